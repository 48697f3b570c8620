"""Weights side by side: none overlaps another, and none needs the others to live."""

from itertools import pairwise

import torch
from paged_kernels.cpu import quantized
from paged_kernels.cpu.weight_memory import WeightMemory

LARGE_PAGE = 2 << 20


def test_what_was_taken_lies_side_by_side_and_is_its_owners_alone() -> None:
    memory = WeightMemory()
    sizes = [1, 4096, 4097, 3 << 20, 40 << 20, 40 << 20, 100 << 20, 5]
    taken = [memory.take(size) for size in sizes]
    assert [tensor.shape for tensor in taken] == [(size,) for size in sizes]
    begins = [tensor.data_ptr() for tensor in taken]
    ends = [begin + size for begin, size in zip(begins, sizes, strict=True)]
    order = sorted(range(len(sizes)), key=begins.__getitem__)
    assert all(ends[a] <= begins[b] for a, b in pairwise(order))
    assert begins[0] % LARGE_PAGE == 0 and begins[1:4] == [begins[0] + offset for offset in (4096, 8192, 16384)]


def test_a_tensor_keeps_its_memory() -> None:
    rows = torch.randn(20, 300)
    alone, beside = quantized.empty_weight(20, 300, 8), quantized.empty_weight(20, 300, 8, WeightMemory())
    for weight in (alone, beside):
        quantized.pack_rows(weight, rows, 0)
    assert torch.equal(beside.packed, alone.packed)
