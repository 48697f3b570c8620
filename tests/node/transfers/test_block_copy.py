"""The compiled copies: the library's digest of what was stored, for every size of row that blocks have."""

import numpy as np
import pytest
import xxhash
from paged_kernels import _native

from kv_connector.pool import copy_rows
from kvrelay.node.transfers.block_copy import choose_copy

_SIZES = (64, 192, 256, 320, 1024, 1088, 2048, 4096 - 64, 4096, 65_536, 196_608, 655_424, 200, 24_592)


@pytest.mark.parametrize("size", _SIZES)
@pytest.mark.parametrize("instruction_set", _native.available_instruction_sets())
@pytest.mark.parametrize("shift", [0, 8])
def test_rows_arrive_with_the_digest_of_the_library(size: int, instruction_set: str, shift: int) -> None:
    before = _native.instruction_set()
    memory = np.random.default_rng(size).integers(0, 256, 5 * size + shift, np.uint8)
    source, room = memory[shift:].reshape(5, size), np.zeros(4 * size + 128, np.uint8)
    begin = -room.ctypes.data % 64 + shift  # whole stripes can be stored past the caches where this is 0
    rows = room[begin : begin + 4 * size].reshape(4, size)
    source.flags.writeable = False
    _native.set_instruction_set(instruction_set)
    assert _native.can_copy_rows() == (instruction_set != "portable")
    try:
        digests = choose_copy()(rows, [3, 0], source, [4, 1])
    finally:
        _native.set_instruction_set(before)
    assert list(digests) == [xxhash.xxh3_128_digest(source[row].tobytes()) for row in (4, 1)]
    assert (rows[3] == source[4]).all() and (rows[0] == source[1]).all() and not rows[1:3].any()
    plain = np.zeros((4, size), np.uint8)
    assert copy_rows(plain, [3, 0], source, [4, 1]) == list(digests) and (plain == rows).all()


def test_every_bit_of_a_row_changes_its_digest() -> None:
    row = np.random.default_rng(0).integers(0, 256, (1, 2048), np.uint8)
    copy, target = choose_copy(), np.empty_like(row)
    seen = {copy(target, [0], row, [0])[0]}
    for position in range(8 * row.size):
        row[0, position // 8] ^= 1 << position % 8
        seen.add(copy(target, [0], row, [0])[0])
        row[0, position // 8] ^= 1 << position % 8
    assert len(seen) == 1 + 8 * row.size


def test_rows_outside_a_buffer_are_refused_before_anything_is_written() -> None:
    source, target = np.ones((2, 256), np.uint8), np.zeros((2, 256), np.uint8)
    if not _native.can_copy_rows():
        with pytest.raises(ValueError, match="no instructions"):
            _native.copy_rows(target, [0], source, [0], 256)
        return
    for target_rows, source_rows in (([0, 2], [0, 1]), ([0, 1], [0, 2]), ([0, -1], [0, 1])):
        with pytest.raises(IndexError, match="outside"):
            _native.copy_rows(target, target_rows, source, source_rows, 256)
    with pytest.raises(ValueError, match="stripes"):
        _native.copy_rows(target, [0], source, [0], 128)
    with pytest.raises(ValueError, match="as many"):
        _native.copy_rows(target, [0], source, [0, 1], 256)
    source.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        _native.copy_rows(source, [0], target, [0], 256)
    assert not target.any()
