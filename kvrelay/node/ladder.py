"""Decides which source is asked for which block of a receiving request: the reader's side of the failure ladder.

For each block in turn these are the source that announced it, then other holders, then the store that all nodes share.
Blocks that do not arrive from one are requested from the next.
Invariant: no source is asked twice for a block unless it has announced more in between, or it is slow and this is the
second time; any other fetch that failed is the last from its source. So the search ends. What a node has sent behind a
bad block is not used, since it may come of that, and nothing from the store either, where the node puts the same.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from kv_connector.base import FetchOutcome
from kvrelay.core.kv.source import KVSource
from kvrelay.core.node_report import STORE, FetchReport

_BLOCKS_PER_ASK = 64  # the first blocks of a long prefix are delivered while the last ones are still fetched
_SLOW_PART = 4  # a fetch that failed, but brought one block in so many, may be that of a link that works and is slow
_MOST_REFUSED = 3  # blocks that failed verification, after which a store is not trusted any more


@dataclass(slots=True)
class _Holder:
    """A source (None: the store) that has the first `available` blocks, as far as we know. `failures`: the last outcome
    of each block that did not arrive from it."""

    source: KVSource | None
    available: int = 0
    failures: dict[int, FetchOutcome] = field(default_factory=dict)
    is_slow: bool = False  # its last fetch failed, but brought so much that it is asked once more
    given_up: bool = False  # a fetch failed, it is doubtful, or too much of the store is bad or may be
    num_refused: int = 0

    @property
    def is_doubtful(self) -> bool:
        """Tells whether this is a node that has sent a bad block, from which it may have computed those behind it."""
        return self.source is not None and self.num_refused > 0

    def raise_to(self, num_blocks: int) -> None:
        self.available = max(self.available, num_blocks)

    def try_missing_again(self) -> None:
        """Allows another try for missing blocks, after the source has published more, but not for refused ones."""
        self.failures = {index: why for index, why in self.failures.items() if why is not FetchOutcome.MISSING}

    def has(self, index: int) -> bool:
        return index < self.available and index not in self.failures and not self.given_up

    def fail(self, index: int, outcome: FetchOutcome) -> None:
        """Notes that a block did not arrive from this source."""
        self.failures[index] = outcome
        self.num_refused += outcome is FetchOutcome.REFUSED
        self.given_up |= outcome is FetchOutcome.FAILED or self.is_doubtful or self.num_refused >= _MOST_REFUSED


@dataclass(frozen=True, slots=True)
class Ask:
    """The next fetch: blocks by their index among the missing ones, from `source` or, if None, the store. `is_guess`:
    the source has not announced these blocks itself, so it should get little time before the next one is asked."""

    source: KVSource | None
    indices: tuple[int, ...]
    is_guess: bool


class Ladder:
    """The search for the blocks 0 .. `num_blocks` - 1 that a request misses. `next` returns the next fetch, `settle`
    takes its outcomes."""

    def __init__(self, num_blocks: int) -> None:
        self.num_leading = 0  # how many of the first blocks are here
        self._origins: list[str | None] = [None] * num_blocks
        self._announced: dict[KVSource, _Holder] = {}
        self._others: dict[KVSource, _Holder] = {}  # that have not announced anything
        self._store = _Holder(None)
        self._failures: Counter[FetchOutcome] = Counter()

    @property
    def is_complete(self) -> bool:
        return self.num_leading == len(self._origins)

    @property
    def is_doubtful(self) -> bool:
        """Tells whether a node has sent a bad block. Others may have more of what came of it."""
        return any(holder.is_doubtful for holder in self._holders())

    def add_holder(self, source: KVSource, num_blocks: int) -> None:
        """Adds another holder of the first `num_blocks` blocks."""
        self._holder(self._others, source).raise_to(num_blocks)

    def announce(self, source: KVSource, num_blocks: int) -> None:
        """Notes that `source` has published the first `num_blocks` blocks. If there is a store, it has them, too."""
        holder = self._holder(self._announced, source)
        holder.raise_to(num_blocks)
        holder.try_missing_again()
        self._store.raise_to(num_blocks)

    def ask_store(self) -> None:
        """Allows asking the store for every block: no source will announce more for now."""
        self._store.raise_to(len(self._origins))

    def next(self) -> Ask | None:
        """Returns the next fetch; None when no known source has the first block that is not here, since the blocks
        behind it are of no use without it."""
        if self.is_complete:
            return None
        holder = next((holder for holder in self._holders() if holder.has(self.num_leading)), None)
        if holder is None:
            return None
        end = min(holder.available, len(self._origins))
        wanted = (i for i in range(self.num_leading, end) if self._origins[i] is None and holder.has(i))
        is_guess = holder.source in self._others and holder.source not in self._announced
        return Ask(holder.source, tuple(islice(wanted, _BLOCKS_PER_ASK)), is_guess)

    def settle(self, ask: Ask, outcomes: Sequence[FetchOutcome]) -> int:
        """Takes one outcome per block of `ask`; returns how many more leading blocks are here. Blocks that arrived
        behind a gap are kept: only the gap is requested from the next source; but not what may come of a bad block.
        What FAILED at a slow source counts as not requested."""
        holder = next(holder for holder in self._holders() if holder.source == ask.source)
        holder.is_slow = not (holder.is_slow or ask.is_guess) and _are_those_of_a_slow_link(outcomes)
        for index, outcome in zip(ask.indices, outcomes, strict=True):
            if outcome is FetchOutcome.FETCHED:
                self._origins[index] = STORE if ask.source is None else ask.source.node_id
                continue
            if holder.is_slow and outcome is FetchOutcome.FAILED:
                continue
            holder.fail(index, outcome)
            if ask.source is not None or outcome is not FetchOutcome.MISSING:  # a store may be empty, or there is none
                self._failures[outcome] += 1
        if holder.is_doubtful:
            self._drop_behind(holder)
        before = self.num_leading
        while not self.is_complete and self._origins[self.num_leading] is not None:
            self.num_leading += 1
        return self.num_leading - before

    def report(self, num_tokens: int) -> FetchReport:
        origins = Counter(origin for origin in self._origins[: self.num_leading] if origin is not None)
        return FetchReport(
            num_tokens,
            tuple(origins.items()),
            num_missing=self._failures[FetchOutcome.MISSING],
            num_refused=self._failures[FetchOutcome.REFUSED],
            num_failed=self._failures[FetchOutcome.FAILED],
        )

    def _drop_behind(self, holder: _Holder) -> None:
        """Drops what a node has sent behind a bad block, in this fetch or before, and what came from the store, which
        is asked no more."""
        assert holder.source is not None
        self._store.given_up = True
        first = min(index for index, why in holder.failures.items() if why is FetchOutcome.REFUSED)
        for index in range(first, len(self._origins)):
            if self._origins[index] in (holder.source.node_id, STORE):
                self._origins[index] = None

    def _holders(self) -> Iterator[_Holder]:
        """Yields the holders, best first."""
        yield from self._announced.values()
        yield from self._others.values()
        yield self._store

    def _holder(self, holders: dict[KVSource, _Holder], source: KVSource) -> _Holder:
        """Returns the holder that is `source`, new or known. One that also announces stays the same holder, so that it
        is not tried again if it could not be reached."""
        if source.is_store_only:
            return self._store
        known = self._announced.get(source) or self._others.pop(source, None) or _Holder(source)
        return holders.setdefault(source, known)


def _are_those_of_a_slow_link(outcomes: Sequence[FetchOutcome]) -> bool:
    """Tells whether a fetch that failed may just have had too little time. The first block then came, because blocks
    come in order, more or less."""
    num_fetched = outcomes.count(FetchOutcome.FETCHED)
    failed, began = FetchOutcome.FAILED in outcomes, outcomes[0] is FetchOutcome.FETCHED
    return failed and began and num_fetched * _SLOW_PART >= len(outcomes)
