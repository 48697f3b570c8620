"""Files mapped for large pages, and large pages in memory that processes share."""

import ctypes
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from paged_kernels import _native
from torch import Tensor

LARGE_PAGE = 2 << 20
MADV_COLLAPSE = 25


@pytest.fixture
def descriptor() -> Iterator[int]:
    descriptor = os.memfd_create("kvrelay-test-pages")
    os.ftruncate(descriptor, 4 * LARGE_PAGE)
    yield descriptor
    os.close(descriptor)


def mappings() -> list[str]:
    """Returns what /proc/self/smaps says of each mapping of the test's memory."""
    found = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    return [mapping for mapping in found if "memfd:kvrelay-test-pages" in mapping]


def large_kib(mapping: str) -> int:
    match = re.search(r"ShmemPmdMapped: +(\d+) kB", mapping)
    assert match is not None
    return int(match[1])


def can_collapse(mapped: Tensor) -> bool:
    """Tells whether the system makes a large page of the first 2 MiB if it is asked to."""
    mapped[0] = 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return bool(madvise(mapped.data_ptr(), LARGE_PAGE, MADV_COLLAPSE) == 0)


def test_a_mapped_file_is_aligned_and_shared(descriptor: int) -> None:
    mapped = _native.map_file(descriptor, LARGE_PAGE, 2 * LARGE_PAGE, shared=True)
    assert (mapped.dtype, mapped.shape) == (torch.uint8, (2 * LARGE_PAGE,))
    assert mapped.data_ptr() % LARGE_PAGE == 0
    mapped[5] = 7
    assert os.pread(descriptor, 6, LARGE_PAGE) == b"\0\0\0\0\0\7"
    behind = _native.map_file(descriptor, LARGE_PAGE + 4096, 4096, shared=True)
    assert behind.data_ptr() % LARGE_PAGE == 4096
    os.pwrite(descriptor, b"\1", LARGE_PAGE + 4096)
    assert behind[0] == mapped[4096] == 1


def test_a_private_mapping_keeps_its_writes_to_itself_and_ends_with_its_tensor(descriptor: int) -> None:
    os.pwrite(descriptor, b"abc", 0)
    mapped = _native.map_file(descriptor, 0, LARGE_PAGE, shared=False)
    part = mapped[1:3]
    del mapped
    assert bytes(part.tolist()) == b"bc"
    part[0] = 0
    assert os.pread(descriptor, 3, 0) == b"abc"
    assert len(mappings()) == 1
    del part
    assert mappings() == []


@pytest.mark.parametrize(("offset", "num_bytes"), [(1, 4096), (-4096, 4096), (0, 0), (0, 100)])
def test_only_whole_pages_are_mapped(descriptor: int, offset: int, num_bytes: int) -> None:
    with pytest.raises(ValueError, match="page"):
        _native.map_file(descriptor, offset, num_bytes, shared=True)


def test_what_cannot_be_mapped_is_told(descriptor: int) -> None:
    with pytest.raises(MemoryError):
        _native.map_file(-1, 0, 4096, shared=True)
    with pytest.raises(MemoryError):
        _native.map_file(descriptor, 0, 1 << 60, shared=True)


def test_large_pages_keep_what_was_written_and_others_map_them_as_they_are(descriptor: int) -> None:
    mapped = _native.map_file(descriptor, 0, 4 * LARGE_PAGE, shared=True)
    is_possible = can_collapse(mapped)
    mapped[LARGE_PAGE + 1] = 9
    _native.take_huge_pages(mapped[LARGE_PAGE + 7 : 2 * LARGE_PAGE + 1])  # in two of the large pages
    assert mapped[LARGE_PAGE + 1] == 9
    assert large_kib(mappings()[0]) == is_possible * 3 * LARGE_PAGE // 1024
    reader = _native.map_file(descriptor, LARGE_PAGE, LARGE_PAGE, shared=False)
    assert reader[1] == 9
    sizes = {large_kib(mapping) for mapping in mappings() if " rw-p " in mapping}
    assert sizes == {is_possible * LARGE_PAGE // 1024}
