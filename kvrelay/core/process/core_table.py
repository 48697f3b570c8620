"""The cores that the nodes of one machine lend each other: a table in shared memory with an entry per node.

An entry says how many cores its node claims: its own share while its engine has work, 0 while it waits. Unclaimed cores
are divided among the nodes that claim some, and a node that changes its claim writes how many cores each of them may
use now. An entry also says until when prompts wait on its node: nodes that only decode leave their cores to it for a
part of that time. All are words that are written at once, so there are no locks, and no system calls after the start.
The table has a name, by which a router sees which nodes share it.
Invariant: only speed depends on the table. What is late makes nodes share a core, or leaves one unused, until it is
read again.
"""

import mmap
import os
import secrets
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

# Prompts wait for so long after a node has said so, unless it says something else: one that was stopped meanwhile
# (SIGSTOP), or hangs, does not hold up the others for ever.
_WAIT_SECONDS: Final = 15
_WORD: Final = "H"  # two aligned bytes in native order, which every processor writes at once
_SECONDS: Final = 2**16 - 1  # that a word can tell apart, besides 0
_STRIDE = 32  # words: entries lie in cache lines of their own
_NAME = slice(1, 5)  # words after the number of cores, before the first entry


def cores_of(entry: int, claims: Sequence[int], num_cores: int) -> int:
    """Returns how many cores the node of `entry` may use, given all claims: its own claim and its part of the unclaimed
    cores. All nodes that claim some get `num_cores` in total, unless their claims already exceed that.
    """
    claimed = claims[entry]
    spare = num_cores - sum(claims)
    if claimed == 0 or spare <= 0:
        return claimed
    part, rest = divmod(spare, sum(claim > 0 for claim in claims))
    return claimed + part + (sum(claim > 0 for claim in claims[:entry]) < rest)


class CoreTable:
    """The table in memory that `create` made, in this process or in the one that started it. The caller owns
    `descriptor`. `now` returns seconds, which on Linux are those of all processes."""

    def __init__(self, descriptor: int, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._words = memoryview(mmap.mmap(descriptor, 0)).cast(_WORD)
        self._claims = self._words[_STRIDE::_STRIDE]
        self._limits = self._words[_STRIDE + 1 :: _STRIDE]
        self._wait_ends = self._words[_STRIDE + 2 :: _STRIDE]  # a second plus 1; 0: no prompts wait

    @staticmethod
    def create(num_cores: int, num_nodes: int) -> int:
        """Makes a table without claims and returns its descriptor, for child processes to inherit. The table lives as
        long as a process has it open or mapped. Raises AttributeError if the system has no such memory (only Linux
        does)."""
        descriptor = os.memfd_create("kvrelay-cores")
        os.ftruncate(descriptor, (1 + num_nodes) * _STRIDE * struct.calcsize(_WORD))
        words = CoreTable(descriptor)._words
        words[0] = num_cores
        words[_NAME] = memoryview(secrets.token_bytes(8)).cast(_WORD)
        return descriptor

    @property
    def num_cores(self) -> int:
        return self._words[0]

    @property
    def name(self) -> str:
        """Returns what no other table is called, on any machine."""
        return self._words[_NAME].tobytes().hex()

    def claim(self, entry: int, num_cores: int, *, prompts_wait: bool = False) -> None:
        """Claims cores for a node that has work, or 0 for a node that has none. `prompts_wait` says whether the node
        has more prompts than it computes now."""
        self._claims[entry] = num_cores
        self._wait_ends[entry] = 1 + (int(self._now()) + _WAIT_SECONDS) % _SECONDS if prompts_wait else 0
        written: list[int] = []
        # Of nodes that do this at the same time, the one that writes last sees all claims before it leaves.
        while written != (claims := self._claims.tolist()):
            for index in range(len(claims)):
                self._limits[index] = cores_of(index, claims, self.num_cores)
            written = claims

    def cores_of(self, entry: int) -> int:
        """Returns how many cores a node may use now, by the function `cores_of`."""
        return self._limits[entry]

    def limit(self, entry: int) -> memoryview:
        """Returns the word in which `cores_of` looks, for who reads it while others write."""
        return self._limits[entry : entry + 1]

    def prompts_wait_beside(self, entry: int) -> bool:
        """Tells whether prompts wait on another node."""
        ends = [end for index, end in enumerate(self._wait_ends) if index != entry and end]
        return any((end - 1 - int(self._now())) % _SECONDS <= _WAIT_SECONDS for end in ends)


@dataclass(frozen=True, slots=True)
class CoreShare:
    """One node's own `num_cores` cores, and its entry in the table. Without a table, the node never gets more."""

    num_cores: int
    table: CoreTable | None = None
    entry: int = 0

    @property
    def table_name(self) -> str:
        """Returns the table's name, nothing without a table."""
        return "" if self.table is None else self.table.name

    def claim(self, *, prompts_wait: bool = False) -> None:
        if self.table is not None:
            self.table.claim(self.entry, self.num_cores, prompts_wait=prompts_wait)

    def release(self) -> None:
        if self.table is not None:
            self.table.claim(self.entry, 0)

    def available(self) -> int:
        """Returns how many cores to use now, after `claim`; never fewer than the node's own."""
        return self.num_cores if self.table is None else max(self.num_cores, self.table.cores_of(self.entry))

    def most(self) -> int:
        """Returns how many cores can be available at any time."""
        return self.num_cores if self.table is None else max(self.num_cores, self.table.num_cores)

    def prompts_wait_elsewhere(self) -> bool:
        """Tells whether prompts wait on another node, which computes them sooner with this one's cores."""
        return self.table is not None and self.table.prompts_wait_beside(self.entry)
