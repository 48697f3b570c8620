"""The digest of a block on the device is the one that the host computes, bit by bit."""

import pytest
import torch
import xxhash
from paged_kernels.gpu import digest
from paged_kernels.gpu.digest import BlockDigests


@pytest.mark.parametrize("block_bytes", [256, 320, 1024, 1088, 2048, 4096 - 64, 40 << 10])
def test_is_xxh3_of_the_block(block_bytes: int) -> None:
    rows = torch.randint(0, 256, (5, block_bytes), dtype=torch.uint8)
    wanted = [3, 0, 4, 3]
    expected = [xxhash.xxh3_128_digest(rows[block_id].numpy().tobytes()) for block_id in wanted]
    assert BlockDigests(rows)(wanted) == expected


def test_every_bit_counts() -> None:
    rows = torch.zeros(1, 1024, dtype=torch.uint8)
    digests = BlockDigests(rows)
    seen = {digests([0])[0]}
    for byte in (0, 63, 64, 959, 960, 1023):
        rows[0, byte] ^= 1
        seen.add(digests([0])[0])
        rows[0, byte] ^= 1
    assert len(seen) == 7


def test_more_blocks_than_one_launch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "_MOST_BLOCKS", 2)
    rows = torch.randint(0, 256, (5, 256), dtype=torch.uint8)
    expected = [xxhash.xxh3_128_digest(row.numpy().tobytes()) for row in rows]
    assert BlockDigests(rows)(range(5)) == expected
    assert BlockDigests(rows)([]) == []


@pytest.mark.parametrize("block_bytes", [128, 1000])
def test_blocks_of_another_kind_are_refused(block_bytes: int) -> None:
    with pytest.raises(ValueError, match="multiple of 64, or too small"):
        BlockDigests(torch.zeros(1, block_bytes, dtype=torch.uint8))
