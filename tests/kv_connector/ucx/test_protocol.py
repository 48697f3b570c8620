"""How much is asked for at a time over UCX, and which openings are understood."""

import pytest

from kv_connector.geometry import Geometry
from kv_connector.ucx.protocol import (
    MAX_ASK_BLOCKS,
    MAX_ASK_BYTES,
    NONCE_BYTES,
    ProtocolError,
    blocks_per_ask,
    decode_opening,
    encode_opening,
)


@pytest.mark.parametrize(
    "block_bytes",
    [1, MAX_ASK_BYTES // MAX_ASK_BLOCKS, MAX_ASK_BYTES // 3, MAX_ASK_BYTES // 2 + 1, MAX_ASK_BYTES, 3 * MAX_ASK_BYTES],
)
def test_an_ask_is_as_large_as_it_may_be_and_has_a_block_at_least(block_bytes: int) -> None:
    count = blocks_per_ask(Geometry(bytes(16), block_bytes))
    assert count == 1 or (count <= MAX_ASK_BLOCKS and count * block_bytes <= MAX_ASK_BYTES)
    assert count == MAX_ASK_BLOCKS or (count + 1) * block_bytes > MAX_ASK_BYTES


@pytest.mark.parametrize("place", [0, 4], ids=["magic", "version"])
def test_an_opening_of_others_or_of_another_version_is_refused(place: int) -> None:
    opening = bytearray(encode_opening(bytes(NONCE_BYTES)))
    assert decode_opening(bytes(opening)) == bytes(NONCE_BYTES)
    reasons = set()
    for bit in (1, 2):
        opening[place] ^= bit
        with pytest.raises(ProtocolError) as caught:
            decode_opening(bytes(opening))
        reasons.add(caught.value.reason)
    assert len(reasons) == 1, "a stranger does not choose what is logged once"
