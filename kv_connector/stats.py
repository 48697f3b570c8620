"""Counters of one connector since it was created. They only grow; written from the node's asyncio loop."""

from dataclasses import dataclass, field

from kv_connector.header import Mismatch


@dataclass(slots=True)
class ConnectorStats:
    """`fetch_seconds` sums the durations of fetches, so overlapping ones count twice. `failed` counts blocks in both
    directions. `quarantined`: destinations that a fetch had to keep past its deadline until the transport let go of
    them. `peers_refused`: connections that were dropped because the peer broke the protocol or is not of this cluster.
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
    refused: dict[Mismatch, int] = field(default_factory=lambda: dict.fromkeys(Mismatch, 0))
