"""Memory in which the nodes of one machine share a model's weights: it has no name, and child processes inherit it.

Nodes take turns. The first one writes the weights and, last of all, a note that describes them; the others find the
note and map the weights. A node that dies during its turn leaves no note, and the next one starts over. The memory is
freed when the last process that has it ends. Invariant: if there is a note, the weights are complete and no process
writes to them any more.
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

_LENGTH_BYTES: Final = 8


class WeightStore:
    """The store in memory that `create` made, in this process or in the one that started it. The caller owns
    `descriptor`. Weights begin at byte `WEIGHTS_OFFSET`."""

    WEIGHTS_OFFSET: Final = 2 << 20  # a large page

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @staticmethod
    def create() -> int:
        """Makes an empty store and returns its descriptor, for child processes to inherit. Raises AttributeError if the
        system has no such memory (only Linux does), OSError if it refuses the memory or does not let it be opened
        again."""
        descriptor = os.memfd_create("kvrelay-weights")
        try:
            os.close(_open_anew(descriptor))  # as every turn does
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    @contextmanager
    def turn(self, on_wait: Callable[[], None]) -> Iterator[None]:
        """Takes a turn while the context is open. If another process has one, calls `on_wait` and waits for its end."""
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
        """Returns the description of the weights; empty if they are missing or incomplete. Must be called in a turn."""
        length = int.from_bytes(os.pread(self.descriptor, _LENGTH_BYTES, 0), "little")
        return os.pread(self.descriptor, length, _LENGTH_BYTES)

    def complete(self, note: bytes) -> None:
        """Stores the note, at the end of the turn in which the weights were written. Raises ValueError if it is too
        long."""
        if not 0 < len(note) <= self.WEIGHTS_OFFSET - _LENGTH_BYTES:
            raise ValueError(f"a note of {len(note)} bytes does not fit before the weights")
        os.pwrite(self.descriptor, note, _LENGTH_BYTES)
        os.pwrite(self.descriptor, len(note).to_bytes(_LENGTH_BYTES, "little"), 0)

    def clear(self) -> None:
        """Frees what another node has left unfinished. Must be called in a turn that found no note."""
        os.ftruncate(self.descriptor, 0)
        os.ftruncate(self.descriptor, self.WEIGHTS_OFFSET)


def _open_anew(descriptor: int) -> int:
    """Opens the same memory again. A lock on the new descriptor is separate; one on an inherited descriptor would be
    held by all processes that have it."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
