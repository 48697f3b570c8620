"""Which blocks a holder was just found not to have, so that the next request with the same prefix does not ask again.

The router's index, which names holders, hears of an eviction later than peers notice. Invariant: an absence is believed
for a moment only, and never against the word of the holder itself.
"""

from collections.abc import Callable, Iterable

from kvrelay.core.block_hash import BlockHash
from kvrelay.core.kv_source import KVSource

_BELIEVED_SECONDS = 2.0  # longer than the news of an eviction takes
_CAPACITY = 8192  # blocks, of all holders together


class Absences:
    """Of one node, over all its requests; on its loop, whose time `now` is."""

    def __init__(self, now: Callable[[], float], *, capacity: int = _CAPACITY) -> None:
        self._now = now
        self._capacity = capacity
        self._until: dict[tuple[KVSource, BlockHash], float] = {}  # the first to be forgotten first

    def note(self, source: KVSource, names: Iterable[BlockHash]) -> None:
        """`source` was asked for these and does not have them."""
        until = self._now() + _BELIEVED_SECONDS
        for name in names:
            self._until.pop((source, name), None)
            self._until[source, name] = until
        while len(self._until) > self._capacity:
            del self._until[next(iter(self._until))]

    def has(self, source: KVSource, name: BlockHash) -> bool:
        """Whether `source` need not be asked for this block now."""
        until = self._until.get((source, name))
        return until is not None and self._now() < until
