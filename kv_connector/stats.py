"""The counters of a connector since it was created. They only grow and are written on the node's asyncio loop."""

from dataclasses import dataclass, field

from kv_connector.header import Mismatch


@dataclass(slots=True)
class ConnectorStats:
    """The counters of one connector. `fetch_seconds` sums the durations of fetches, so overlapping ones count twice.
    `failed` counts blocks in both directions; `skipped` are those of them for which a server or holder that keeps
    failing was not even asked. `quarantined`: destinations that a fetch had to keep past its deadline until the
    transport gave them up. `peers_refused`: connections dropped because the peer broke the protocol or does not belong
    to this cluster. `lost_unstored`: blocks that lost their content before they were stored, or still waited when
    the connector was closed. `not_worth`: blocks that were not fetched because computing them is faster."""

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
    lost_unstored: int = 0
    not_worth: int = 0
    refused: dict[Mismatch, int] = field(default_factory=lambda: dict.fromkeys(Mismatch, 0))

    def count_published(self, num_blocks: int, block_bytes: int) -> None:
        self.blocks_published += num_blocks
        self.bytes_published += num_blocks * block_bytes
