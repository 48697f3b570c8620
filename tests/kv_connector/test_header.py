"""The bytes of a block's header, and which field a wrong header is refused for."""

from dataclasses import replace

import pytest

from kv_connector.header import HEADER_BYTES, BlockHeader, Mismatch, layout_digest, payload_digest
from kvrelay.core.kv.block_hash import BlockHash
from tests.kv_connector.backends import LAYOUT

NAME = BlockHash(bytes(range(32)))
HEADER = BlockHeader(NAME, layout_digest(LAYOUT), 1 << 40, 16, 2**64 - 1, payload_digest(b"payload"))


def test_a_header_has_the_documented_bytes() -> None:
    data = HEADER.encode()
    assert len(data) == HEADER_BYTES == 96
    assert data[:40] == b"KVRB\x01\0\0\0" + NAME
    assert data[56:80] == (1 << 40).to_bytes(8, "little") + b"\x10" + bytes(7) + b"\xff" * 8
    assert BlockHeader.decode(data) == HEADER


@pytest.mark.parametrize(
    ("damaged", "expected"),
    [
        (HEADER, None),
        (replace(HEADER, magic=b"RIFF"), Mismatch.VERSION),
        (replace(HEADER, version=2), Mismatch.VERSION),
        (replace(HEADER, block_hash=BlockHash(bytes(32))), Mismatch.HASH),
        (replace(HEADER, layout_digest=bytes(16)), Mismatch.LAYOUT),
        (replace(HEADER, payload_bytes=1), Mismatch.LENGTH),
        (replace(HEADER, num_tokens=15), Mismatch.TOKENS),
        (replace(HEADER, epoch=1), Mismatch.EPOCH),
    ],
)
def test_a_wrong_header_is_refused_for_its_first_wrong_field(damaged: BlockHeader, expected: Mismatch | None) -> None:
    def verify(epoch: int | None) -> Mismatch | None:
        return damaged.verify(
            block_hash=NAME, layout_digest=layout_digest(LAYOUT), payload_bytes=1 << 40, num_tokens=16, epoch=epoch
        )

    assert verify(2**64 - 1) is expected
    assert verify(None) is (None if expected is Mismatch.EPOCH else expected)


def test_another_payload_is_refused_for_its_digest() -> None:
    assert HEADER.verify_payload(payload_digest(b"payload")) is None
    assert HEADER.verify_payload(payload_digest(b"Payload")) is Mismatch.DIGEST
