"""The cores that the nodes of one machine lend each other: a table in shared memory with an entry per node.

An entry is the number of cores that its node claims: its own share while its engine has work, 0 while it waits. What
nobody claims is divided among those who claim. An entry is one word, written by its node alone, and by whoever started
the node once that has ended: no locks, and no system calls after the start.
Invariant: only speed depends on the table. A late or stale entry makes nodes share a core, or leaves one unused, until
it is read again.
"""

import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_WORD: Final = "H"  # two bytes in native order, aligned: no processor tears them
_STRIDE = 32  # words: entries lie in cache lines of their own


def cores_of(entry: int, claims: Sequence[int], num_cores: int) -> int:
    """Cores that the node of `entry` may use while these are the claims: what it claims and its part of what nobody
    does. The parts of all who claim add up to `num_cores`, unless their claims are more already.
    """
    claimed = claims[entry]
    spare = num_cores - sum(claims)
    if claimed == 0 or spare <= 0:
        return claimed
    part, rest = divmod(spare, sum(claim > 0 for claim in claims))
    return claimed + part + (sum(claim > 0 for claim in claims[:entry]) < rest)


class CoreTable:
    """`descriptor` is of memory that `create` has made, here or in the process that started this one, and belongs to
    the caller."""

    def __init__(self, descriptor: int) -> None:
        self._words = memoryview(mmap.mmap(descriptor, 0)).cast(_WORD)
        self._claims = self._words[_STRIDE::_STRIDE]

    @staticmethod
    def create(num_cores: int, num_nodes: int) -> int:
        """A descriptor of a new table without claims, for child processes to inherit. It lives as long as somebody has
        it open or mapped. Raises AttributeError where the system has no such memory (it is Linux's)."""
        descriptor = os.memfd_create("kvrelay-cores")
        os.ftruncate(descriptor, (1 + num_nodes) * _STRIDE * struct.calcsize(_WORD))
        CoreTable(descriptor)._words[0] = num_cores
        return descriptor

    def claim(self, entry: int, num_cores: int) -> None:
        """While the node has work; 0 when it has none."""
        self._claims[entry] = num_cores

    def cores_of(self, entry: int) -> int:
        """As the function of this name, at this moment."""
        return cores_of(entry, self._claims.tolist(), self._words[0])


@dataclass(frozen=True, slots=True)
class CoreShare:
    """One node's `num_cores`, and its entry in the table. Without a table it has just these."""

    num_cores: int
    table: CoreTable | None = None
    entry: int = 0

    def claim(self) -> None:
        if self.table is not None:
            self.table.claim(self.entry, self.num_cores)

    def release(self) -> None:
        if self.table is not None:
            self.table.claim(self.entry, 0)

    def available(self) -> int:
        """Cores to use now, after `claim`; never fewer than the node's own."""
        return self.num_cores if self.table is None else max(self.num_cores, self.table.cores_of(self.entry))
