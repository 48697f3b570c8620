"""Turns a backend's verdicts on blocks into the result of a fetch, counts them, and logs that some were refused."""

from collections import Counter

from kv_connector.base import FetchOutcome, FetchOutcomes
from kv_connector.header import Mismatch
from kv_connector.stats import ConnectorStats
from kvrelay.core.clock import Clock
from kvrelay.core.kv.source import KVSource
from kvrelay.core.outages import Outages

Verdict = FetchOutcome | Mismatch
"""An outcome, or the field for which the block was refused."""


class Verdicts:
    """The verdicts of one call of `fetch`, made when it begins. The backend adds to `found` one verdict per block, in
    order, while there is time left of `timeout` (seconds)."""

    def __init__(self, num_blocks: int, *, timeout: float, clock: Clock) -> None:
        self.found: list[Verdict] = []
        self._num_blocks = num_blocks
        self._timeout = timeout
        self._clock = clock
        self._started = clock.now()

    @property
    def seconds_left(self) -> float:
        """Returns the time left; 0 or less when it is over."""
        return self._timeout - (self._clock.now() - self._started)

    def settle(
        self, source: KVSource | None, stats: ConnectorStats, outages: Outages, *, block_bytes: int
    ) -> FetchOutcomes:
        """Returns the result of the fetch. Blocks without a verdict have FAILED. `source` is None for a store.
        `outages`: those of the connector."""
        self.found += [FetchOutcome.FAILED] * (self._num_blocks - len(self.found))
        outcomes = tuple(FetchOutcome.REFUSED if isinstance(found, Mismatch) else found for found in self.found)
        fetched = outcomes.count(FetchOutcome.FETCHED)
        stats.blocks_fetched += fetched
        stats.bytes_fetched += fetched * block_bytes
        stats.fetch_seconds += self._clock.now() - self._started
        stats.missing += outcomes.count(FetchOutcome.MISSING)
        stats.failed += outcomes.count(FetchOutcome.FAILED)
        refused = Counter(found for found in self.found if isinstance(found, Mismatch))
        origin = "the store" if source is None else f"node {source.node_id}"
        name = f"verifying blocks from {origin}"
        for mismatch, count in refused.items():
            stats.refused[mismatch] += count
            message = "refused %d of %d blocks from %s: %s differs"
            outages.failed(name, message, count, len(outcomes), origin, mismatch.value)
        if fetched and not refused:
            outages.succeeded(name)
        return outcomes
