"""Counters of one connector since it was created. They only grow; written from the node's asyncio loop."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields

from kv_connector.header import Mismatch


@dataclass(slots=True)
class ConnectorStats:
    """`fetch_seconds` sums the durations of fetches, so overlapping ones count twice. `failed` counts blocks in both
    directions. `quarantined`: destinations that a fetch had to keep past its deadline until the transport let go of
    them. `peers_refused`: connections that were dropped because the peer broke the protocol or is not of this cluster.
    `skipped`: of the failed, those for which a server that keeps failing was not even asked. `retracted`: blocks that
    lost their content before they were stored. `not_worth`: blocks that were not fetched because computing is faster.
    """

    blocks_published: int = 0
    bytes_published: int = 0
    blocks_fetched: int = 0
    bytes_fetched: int = 0
    fetch_seconds: float = 0.0
    missing: int = 0
    failed: int = 0
    quarantined: int = 0
    peers_refused: int = 0
    skipped: int = 0
    retracted: int = 0
    not_worth: int = 0
    refused: dict[Mismatch, int] = field(default_factory=lambda: dict.fromkeys(Mismatch, 0))

    def count_published(self, num_blocks: int, block_bytes: int) -> None:
        self.blocks_published += num_blocks
        self.bytes_published += num_blocks * block_bytes


def total(parts: Iterable[ConnectorStats]) -> ConnectorStats:
    """The sums, as they are now: a block that two backends missed counts twice."""
    result = ConnectorStats()
    for part in parts:
        for counter in fields(ConnectorStats):
            if counter.name != "refused":
                setattr(result, counter.name, getattr(result, counter.name) + getattr(part, counter.name))
        for mismatch, count in part.refused.items():
            result.refused[mismatch] += count
    return result
