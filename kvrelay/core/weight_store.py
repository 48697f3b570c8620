"""Memory in which the nodes of one machine share a model's weights: it has no name, and child processes inherit it.

Nodes take turns. The first one writes the weights and, last of all, a note that describes them; the others find the
note and map the weights. A node that dies during its turn leaves no note, and the next one starts over. The memory is
freed when the last process that has it ends. Invariant: a note means complete weights, which nobody writes to any more.
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

_LENGTH_BYTES: Final = 8


class WeightStore:
    """`descriptor` refers to memory that `create` made, in this process or in the one that started it, and belongs to
    the caller. Weights begin at byte `WEIGHTS_OFFSET`."""

    WEIGHTS_OFFSET: Final = 2 << 20  # a large page

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @staticmethod
    def create() -> int:
        """A descriptor of a new and empty store, for child processes to inherit. Raises AttributeError if the system
        has no such memory (only Linux does), OSError if it refuses it or does not let it be opened again."""
        descriptor = os.memfd_create("kvrelay-weights")
        try:
            os.close(_open_anew(descriptor))  # as every turn will
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    @contextmanager
    def turn(self, on_wait: Callable[[], None]) -> Iterator[None]:
        """At most one process has a turn at a time. Waits for the turns of others, after calling `on_wait`."""
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
        """The description of the weights in the store; empty if they are missing or incomplete. Within a turn."""
        length = int.from_bytes(os.pread(self.descriptor, _LENGTH_BYTES, 0), "little")
        return os.pread(self.descriptor, length, _LENGTH_BYTES)

    def complete(self, note: bytes) -> None:
        """At the end of the turn in which the weights were written. Raises ValueError if the note does not fit."""
        if not 0 < len(note) <= self.WEIGHTS_OFFSET - _LENGTH_BYTES:
            raise ValueError(f"a note of {len(note)} bytes does not fit before the weights")
        os.pwrite(self.descriptor, note, _LENGTH_BYTES)
        os.pwrite(self.descriptor, len(note).to_bytes(_LENGTH_BYTES, "little"), 0)

    def clear(self) -> None:
        """Within a turn that found no note: frees what another node left unfinished."""
        os.ftruncate(self.descriptor, 0)
        os.ftruncate(self.descriptor, self.WEIGHTS_OFFSET)


def _open_anew(descriptor: int) -> int:
    """Another descriptor of the same memory, with locks of its own: those on an inherited one are held together."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
