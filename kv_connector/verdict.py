"""From what a backend found out about each block to the result of a fetch: counted, and logged when a block was
refused.
"""

import logging
from collections import Counter
from collections.abc import Sequence

from kv_connector.base import FetchOutcome, FetchResult
from kv_connector.header import Mismatch
from kv_connector.stats import ConnectorStats

Verdict = FetchOutcome | Mismatch
"""An outcome, or the field for which the block was refused."""

_logger = logging.getLogger(__name__)


def settle(
    verdicts: Sequence[Verdict], *, stats: ConnectorStats, block_bytes: int, seconds: float, origin: str
) -> FetchResult:
    """The result for the caller. `origin` names the source in the log."""
    outcomes = tuple(FetchOutcome.REFUSED if isinstance(verdict, Mismatch) else verdict for verdict in verdicts)
    fetched = outcomes.count(FetchOutcome.FETCHED)
    stats.blocks_fetched += fetched
    stats.bytes_fetched += fetched * block_bytes
    stats.fetch_seconds += seconds
    stats.missing += outcomes.count(FetchOutcome.MISSING)
    stats.failed += outcomes.count(FetchOutcome.FAILED)
    refused = Counter(verdict for verdict in verdicts if isinstance(verdict, Mismatch))
    for mismatch, count in refused.items():
        stats.refused[mismatch] += count
        _logger.warning("refused %d of %d blocks from %s: %s differs", count, len(verdicts), origin, mismatch.value)
    return FetchResult(outcomes)
