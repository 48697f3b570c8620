"""Which source is asked for which block of one receiving request: the reader's side of the failure ladder.

For each block in turn: the source that announced it, then other holders, then the store that all nodes share. What did
not arrive from one is asked of the next. Invariant: no source is asked twice for a block unless it has announced more
in between, and a source that could not be reached is not asked again, so the search ends.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kv_connector.base import FetchOutcome
from kvrelay.core.kv_source import KVSource

_BLOCKS_PER_ASK = 64  # the first blocks of a long prefix are delivered while the last ones still move
_MOST_REFUSED = 3  # blocks that failed verification; one may be an accident, more are the source's fault
_STORE = ""


@dataclass(frozen=True, slots=True)
class FetchReport:
    """What became of a reception. `fetched`: (node id or "" for the store, leading blocks that came from there).
    `failures`: how many blocks were asked for without success, by outcome."""

    num_tokens: int
    fetched: tuple[tuple[str, int], ...]
    failures: tuple[tuple[FetchOutcome, int], ...]


NOTHING_FETCHED = FetchReport(0, (), ())


@dataclass(slots=True)
class _Offer:
    """A source (None: the store) that has the first `available` blocks, as far as we were told."""

    source: KVSource | None
    available: int = 0
    failures: dict[int, FetchOutcome] = field(default_factory=dict)
    given_up: bool = False  # it could not be reached, or sends what is not to be trusted
    num_refused: int = 0

    def raise_to(self, num_blocks: int) -> None:
        self.available = max(self.available, num_blocks)

    def try_missing_again(self) -> None:
        """It has published since; what it once had wrong it is not asked for again."""
        self.failures = {index: why for index, why in self.failures.items() if why is not FetchOutcome.MISSING}

    def has(self, index: int) -> bool:
        return index < self.available and index not in self.failures and not self.given_up

    def fail(self, index: int, outcome: FetchOutcome) -> None:
        """What it was asked for did not arrive, or not as it should be."""
        self.failures[index] = outcome
        self.num_refused += outcome is FetchOutcome.REFUSED
        self.given_up |= outcome is FetchOutcome.FAILED or self.num_refused >= _MOST_REFUSED


@dataclass(frozen=True, slots=True)
class Ask:
    """The next fetch: blocks by their index among the missing ones. `source` None asks the store. `is_guess`: the
    source has not announced these blocks itself; while it keeps us waiting, nobody else is asked."""

    source: KVSource | None
    indices: tuple[int, ...]
    is_guess: bool


class Ladder:
    """Of the blocks 0 .. `num_blocks` - 1 that a request misses. `next` says what to fetch now, `settle` takes what
    became of it."""

    def __init__(self, num_blocks: int) -> None:
        self.num_leading = 0  # how many of the first blocks are here
        self._origins: list[str | None] = [None] * num_blocks
        self._announced: dict[KVSource, _Offer] = {}
        self._holders: dict[KVSource, _Offer] = {}
        self._store = _Offer(None)
        self._failures: Counter[FetchOutcome] = Counter()

    @property
    def is_complete(self) -> bool:
        return self.num_leading == len(self._origins)

    def offer(self, source: KVSource, num_blocks: int) -> None:
        """Another holder of the first `num_blocks` blocks."""
        self._offer(self._holders, source).raise_to(num_blocks)

    def announce(self, source: KVSource, num_blocks: int) -> None:
        """`source` has published the first `num_blocks` blocks. So has a store, should there be one."""
        offer = self._offer(self._announced, source)
        offer.raise_to(num_blocks)
        offer.try_missing_again()
        self._store.raise_to(num_blocks)

    def ask_store(self) -> None:
        """No source will announce more for now: the store may have what nobody announced."""
        self._store.raise_to(len(self._origins))

    def next(self) -> Ask | None:
        """None when nobody we know of has the first block that is not here: what lies behind it is of no use."""
        if self.is_complete:
            return None
        offer = next((offer for offer in self._offers() if offer.has(self.num_leading)), None)
        if offer is None:
            return None
        end = min(offer.available, len(self._origins))
        wanted = [i for i in range(self.num_leading, end) if self._origins[i] is None and offer.has(i)]
        is_guess = offer.source in self._holders and offer.source not in self._announced
        return Ask(offer.source, tuple(wanted[:_BLOCKS_PER_ASK]), is_guess)

    def settle(self, ask: Ask, outcomes: Sequence[FetchOutcome]) -> int:
        """Takes one outcome per block asked for; returns how many more leading blocks are here. Those that arrived
        behind a gap are kept: only the gap is asked of the next."""
        offer = next(offer for offer in self._offers() if offer.source == ask.source)
        for index, outcome in zip(ask.indices, outcomes, strict=True):
            if outcome is FetchOutcome.FETCHED:
                self._origins[index] = _STORE if ask.source is None else ask.source.node_id
                continue
            offer.fail(index, outcome)
            if ask.source is not None or outcome is not FetchOutcome.MISSING:  # a store may be empty, or not there
                self._failures[outcome] += 1
        before = self.num_leading
        while not self.is_complete and self._origins[self.num_leading] is not None:
            self.num_leading += 1
        return self.num_leading - before

    def report(self, num_tokens: int) -> FetchReport:
        origins = Counter(origin for origin in self._origins[: self.num_leading] if origin is not None)
        return FetchReport(num_tokens, tuple(origins.items()), tuple(self._failures.items()))

    def _offers(self) -> Iterator[_Offer]:
        """Best first."""
        yield from self._announced.values()
        yield from self._holders.values()
        yield self._store

    def _offer(self, offers: dict[KVSource, _Offer], source: KVSource) -> _Offer:
        """A source that peers reach without an address publishes to the store. One that is known already stays one
        offer: whoever could not be reached as a holder is not tried again as a prefill node."""
        if not source.endpoint:
            return self._store
        known = self._announced.get(source) or self._holders.pop(source, None) or _Offer(source)
        return offers.setdefault(source, known)
