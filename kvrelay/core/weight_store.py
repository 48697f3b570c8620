"""Memory in which the nodes of one machine keep a model's weights once: it has no name, and they inherit it.

The first node whose turn it is writes the weights there and last a note of what they are; the others find the note and
map them. A node that ends within its turn leaves no note, and the next one begins again. The memory is gone when the
last process that has it is. Invariant: whoever finds a note finds complete weights, which nobody writes to any more.
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

_LENGTH_BYTES: Final = 8


class WeightStore:
    """`descriptor` is of memory that `create` has made, here or in the process that started this one, and belongs to
    the caller. Weights begin at `WEIGHTS_OFFSET`."""

    WEIGHTS_OFFSET: Final = 2 << 20  # a large page

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @staticmethod
    def create() -> int:
        """A descriptor of a new and empty store, for child processes to inherit. Raises AttributeError where the system
        has no such memory (it is Linux's), OSError where it does not give it, or not a second time."""
        descriptor = os.memfd_create("kvrelay-weights")
        try:
            os.close(_open_anew(descriptor))  # as every turn will
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    @contextmanager
    def turn(self, on_wait: Callable[[], None]) -> Iterator[None]:
        """No other process has one meanwhile. Waits as long as others load; calls `on_wait` before that."""
        own = _open_anew(self.descriptor)
        try:
            try:
                fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(own, fcntl.LOCK_EX)
            yield
        finally:
            os.close(own)

    def note(self) -> bytes:
        """What the weights in the store are; empty where they are not complete, or not there. Within a turn."""
        length = int.from_bytes(os.pread(self.descriptor, _LENGTH_BYTES, 0), "little")
        return os.pread(self.descriptor, length, _LENGTH_BYTES)

    def complete(self, note: bytes) -> None:
        """At the end of the turn in which the weights were written. Raises ValueError for a note that has no room."""
        if not 0 < len(note) <= self.WEIGHTS_OFFSET - _LENGTH_BYTES:
            raise ValueError(f"a note of {len(note)} bytes does not fit before the weights")
        os.pwrite(self.descriptor, note, _LENGTH_BYTES)
        os.pwrite(self.descriptor, len(note).to_bytes(_LENGTH_BYTES, "little"), 0)

    def clear(self) -> None:
        """Within a turn that found no note: what somebody left unfinished is given back."""
        os.ftruncate(self.descriptor, 0)
        os.ftruncate(self.descriptor, self.WEIGHTS_OFFSET)


def _open_anew(descriptor: int) -> int:
    """Another descriptor of the same memory, with locks of its own: those on an inherited one are held together."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
