"""Memory for the weights of a model, side by side in large pages.

Invariant: a tensor that was handed out overlaps no other, and keeps the memory alive by itself. Weights one by one
would begin and end within a large page each, and what lies there comes in small ones, whose addresses the processor
then looks up all the time.
"""

import torch
from torch import Tensor

from paged_kernels.extension import load_extension

_PAGE = 2 << 20
_CHUNK = 64 << 20
_ALIGNMENT = 4096


class WeightMemory:
    """Takes memory from the system in chunks. What was not written to, the end of the last chunk in particular, costs
    nothing. For one thread."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)  # of the current chunk

    def take(self, num_bytes: int) -> Tensor:
        """`[num_bytes]` uint8, undefined."""
        room = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if room > self._rest.numel():
            self._rest = _chunk(max(room, _CHUNK))
        taken, self._rest = self._rest[:num_bytes], self._rest[room:]
        return taken


def _chunk(num_bytes: int) -> Tensor:
    whole = torch.empty(num_bytes + _PAGE, dtype=torch.uint8)
    begin = -whole.data_ptr() % _PAGE
    chunk = whole[begin : begin + num_bytes]
    native = load_extension()
    if native is not None:
        native.prefer_huge_pages(chunk.view(1, -1).view(torch.bfloat16))
    return chunk
