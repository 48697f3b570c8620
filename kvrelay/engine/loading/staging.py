"""Host memory through which a checkpoint's bytes reach a card: pinned chunks in turn, so that one is read and digested
while those before it are still on their way.

Invariant: a chunk is not written to before the copy out of it has ended.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

_NUM_CHUNKS = 4


class CopyEnd(Protocol):
    """The end of what has been enqueued when it was recorded; a `torch.cuda.Event`."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Staging:
    """Of `chunk_bytes` a chunk. Makes nothing before it is needed; for one thread."""

    def __init__(
        self,
        chunk_bytes: int,
        make_chunk: Callable[[int], Tensor] | None = None,
        make_end: Callable[[], CopyEnd] | None = None,
    ) -> None:
        """`make_chunk` and `make_end`: pinned memory and CUDA events, unless others are given."""
        self._chunk_bytes = chunk_bytes
        self._make_chunk = make_chunk or _pinned
        self._make_end: Callable[[], CopyEnd] = make_end or torch.cuda.Event
        self._chunks: deque[tuple[Tensor, CopyEnd]] = deque()

    def chunk(self) -> Tensor:
        """`[chunk_bytes]` uint8 to read into; waits for the copy out of it, if there was one."""
        if len(self._chunks) < _NUM_CHUNKS:
            self._chunks.append((self._make_chunk(self._chunk_bytes), self._make_end()))
        else:
            self._chunks.rotate(-1)
            self._chunks[-1][1].synchronize()
        return self._chunks[-1][0]

    def send(self, part: Tensor, target: Tensor) -> None:
        """Enqueues the copy of `part`, of the chunk that `chunk` gave last, into `target`, converting its dtype."""
        target.copy_(part, non_blocking=True)
        self._chunks[-1][1].record()


def _pinned(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
