"""Remembers which blocks a holder was just found not to have, so that the next request with that prefix asks others.

The router's index, which names holders, learns of an eviction later than peers notice it.
Invariant: an absence is remembered for a moment only, and does not count when the holder itself announces the block.
"""

from collections.abc import Callable, Iterable

from kvrelay.core.kv.block_hash import BlockHash
from kvrelay.core.kv.source import KVSource

_REMEMBERED_SECONDS = 2.0  # longer than an eviction takes to reach the router's index
_CAPACITY = 8192  # blocks, of all holders together


class Absences:
    """One per node, shared by its requests and used on its event loop. `now` reads that loop's clock."""

    def __init__(self, now: Callable[[], float], *, capacity: int = _CAPACITY) -> None:
        self._now = now
        self._capacity = capacity
        self._until: dict[tuple[KVSource, BlockHash], float] = {}  # the next to be forgotten comes first

    def note(self, source: KVSource, names: Iterable[BlockHash]) -> None:
        """Remembers that `source` was asked for these blocks and does not have them."""
        until = self._now() + _REMEMBERED_SECONDS
        for name in names:
            self._until.pop((source, name), None)
            self._until[source, name] = until
        while len(self._until) > self._capacity:
            del self._until[next(iter(self._until))]

    def has(self, source: KVSource, name: BlockHash) -> bool:
        """Tells whether `source` was found not to have this block a moment ago."""
        until = self._until.get((source, name))
        return until is not None and self._now() < until
