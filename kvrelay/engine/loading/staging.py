"""Pinned host memory through which a checkpoint's bytes reach a GPU, used chunk by chunk: one chunk is read and
digested while the chunks before it are still being copied.

Invariant: a chunk is not written to before the copy out of it has ended.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

_NUM_CHUNKS = 4


class CopyEnd(Protocol):
    """What tells when a copy has ended, such as a `torch.cuda.Event`. `record` marks the end of the work enqueued so
    far; `synchronize` waits for it."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Staging:
    """A ring of chunks of `chunk_bytes` each, allocated when they are needed. For one thread."""

    def __init__(
        self,
        chunk_bytes: int,
        make_chunk: Callable[[int], Tensor] | None = None,
        make_end: Callable[[], CopyEnd] | None = None,
    ) -> None:
        """Allocates pinned memory and CUDA events, unless `make_chunk` and `make_end` are given."""
        self._chunk_bytes = chunk_bytes
        self._make_chunk = make_chunk or _pinned
        self._make_end: Callable[[], CopyEnd] = make_end or torch.cuda.Event
        self._chunks: deque[tuple[Tensor, CopyEnd]] = deque()

    def chunk(self) -> Tensor:
        """Returns a chunk to read into, `[chunk_bytes]` uint8, once the last copy out of it has ended."""
        if len(self._chunks) < _NUM_CHUNKS:
            self._chunks.append((self._make_chunk(self._chunk_bytes), self._make_end()))
        else:
            self._chunks.rotate(-1)
            self._chunks[-1][1].synchronize()
        return self._chunks[-1][0]

    def send(self, part: Tensor, target: Tensor) -> None:
        """Enqueues the copy of `part`, a part of the last chunk, into `target`, converting its dtype."""
        target.copy_(part, non_blocking=True)
        self._chunks[-1][1].record()


def _pinned(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
