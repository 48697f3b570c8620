"""Memory for the weights of a model, side by side in large pages.

Invariant: a tensor that was handed out overlaps no other, and keeps the memory alive by itself. Weights one by one
would begin and end within a large page each, and what lies there comes in small ones, whose addresses the processor
then looks up all the time.
"""

from math import prod

import torch
from torch import Tensor

from paged_kernels.cpu.extension import load_extension

_LARGE_PAGE = 2 << 20
_CHUNK = 64 << 20
_ALIGNMENT = 4096


class WeightMemory:
    """Memory that is taken from the system in chunks. What was not written to, the end of the last chunk in particular,
    costs nothing. For one thread. `is_filled`: what is taken holds its values already, and nobody may write to it."""

    is_filled = False

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)  # of the current chunk

    def take(self, num_bytes: int) -> Tensor:
        """Returns `[num_bytes]` uint8, undefined."""
        room = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if room > self._rest.numel():
            self._rest = self._chunk(-(-max(room, _CHUNK) // _LARGE_PAGE) * _LARGE_PAGE)
            native = load_extension()
            if native is not None:
                native.prefer_huge_pages(self._rest.view(1, -1).view(torch.bfloat16))
        taken, self._rest = self._rest[:num_bytes], self._rest[room:]
        return taken

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns a tensor in memory as `take` returns it."""
        return self.take(prod(shape) * dtype.itemsize).view(dtype).view(shape)

    def _chunk(self, num_bytes: int) -> Tensor:
        """Returns `num_bytes` of the system, a multiple of a large page, which begin with one where that can be had."""
        whole = torch.empty(num_bytes + _LARGE_PAGE, dtype=torch.uint8)
        begin = -whole.data_ptr() % _LARGE_PAGE
        return whole[begin : begin + num_bytes]
