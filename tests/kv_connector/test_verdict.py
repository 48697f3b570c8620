"""What a fetch adds to its connector's counters and to the log."""

from collections.abc import Sequence

import pytest

from kv_connector.base import FetchOutcome, FetchOutcomes
from kv_connector.header import Mismatch
from kv_connector.stats import ConnectorStats
from kv_connector.verdict import Verdict, Verdicts
from kvrelay.core.kv.source import KVSource
from kvrelay.core.outages import Outages
from tests.manual_clock import ManualClock

FETCHED, MISSING, REFUSED, FAILED = FetchOutcome


class Fetches:
    """Fetches of one connector, which find what they are told."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.stats = ConnectorStats()
        self._outages = Outages(self.clock.now)

    def fetch(self, found: Sequence[Verdict], *, num_blocks: int, seconds: float = 0.0) -> FetchOutcomes:
        verdicts = Verdicts(num_blocks, timeout=10.0, clock=self.clock)
        self.clock.seconds += seconds
        verdicts.found += found
        return verdicts.settle(KVSource("owner", 1, "?"), self.stats, self._outages, block_bytes=100)


def test_each_fetch_adds_its_blocks_and_its_duration() -> None:
    fetches = Fetches()
    found: list[Verdict] = [FETCHED, MISSING, Mismatch.TOKENS, Mismatch.TOKENS, FETCHED]
    outcomes = (FETCHED, MISSING, REFUSED, REFUSED, FETCHED, FAILED)
    assert fetches.fetch(found, num_blocks=6, seconds=1.5) == outcomes
    assert fetches.fetch([FETCHED], num_blocks=1, seconds=0.25) == (FETCHED,)
    stats = fetches.stats
    assert stats.fetch_seconds == 1.75
    assert (stats.blocks_fetched, stats.bytes_fetched, stats.missing, stats.failed) == (3, 300, 1, 1)
    assert {mismatch: count for mismatch, count in stats.refused.items() if count} == {Mismatch.TOKENS: 2}


def test_refusals_are_over_when_a_fetch_brings_blocks_and_none_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvrelay.core.outages")
    fetches = Fetches()
    half_refused: list[Verdict] = [Mismatch.DIGEST, FETCHED]
    for found in (half_refused, half_refused[::-1], [MISSING, FAILED]):
        fetches.fetch(found, num_blocks=2)
        fetches.clock.seconds += 20.0  # as long as it takes for something to work again
    begun = "refused 1 of 2 blocks from node owner: digest differs; not logged again while it fails"
    assert caplog.messages == [begun]
    fetches.fetch([FETCHED, MISSING], num_blocks=2)
    assert caplog.messages == [begun, "verifying blocks from node owner works again; it failed 2 times"]
