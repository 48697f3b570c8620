"""The connector seam: how blocks leave a pool under their names, and how they come in.

Transfers are pull only. Nobody writes into a pool from outside: `fetch` copies into blocks that the caller reserved,
and when it returns (or raises) nothing writes to them any more. Every block travels with a `BlockHeader` (see
`header.py`); one that does not match what was asked for is never reported as fetched.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from kv_connector.stats import ConnectorStats
from kvrelay.core.kv_layout import KVLayout
from kvrelay.core.kv_source import KVSource
from kvrelay.core.named_block import NamedBlock


@dataclass(frozen=True, slots=True)
class PoolBuffer:
    """A node's whole KV pool as bytes: block i is `memory[i * layout.block_bytes : (i + 1) * layout.block_bytes]`,
    writable.

    `memory` belongs to the connector that allocated it and is valid until `close`.
    """

    memory: memoryview
    layout: KVLayout
    num_blocks: int


class FetchOutcome(Enum):
    """What became of one requested block."""

    FETCHED = "fetched"
    MISSING = "missing"  # the source does not hold it (any more)
    REFUSED = "refused"  # it was there but did not pass verification; counted and logged
    FAILED = "failed"  # the source could not be reached


@dataclass(frozen=True, slots=True)
class FetchResult:
    """One outcome per requested block, in order."""

    outcomes: tuple[FetchOutcome, ...]


class KVConnector(Protocol):
    """What a node moves its blocks with, over a pool that is there. Called from the node's asyncio loop unless said
    otherwise.

    No method blocks the loop for longer than it takes to copy a few blocks, and none waits without a deadline. Methods
    that move data report per block instead of raising; they raise `KVError` only when nothing can be said about any
    block.
    """

    name: str
    has_store: bool
    """Blocks are published to a store that all nodes share, too: a `fetch` without a source asks it. It forgets while
    the pool still holds the block: publish again what a request has found by name."""

    @property
    def stats(self) -> ConnectorStats:
        """The counters over all backends in use."""
        ...

    def all_stats(self) -> Mapping[str, ConnectorStats]:
        """The counters of every backend in use, by the backend's name: its own, or those of each tier."""
        ...

    @property
    def endpoint(self) -> str:
        """What a peer's `fetch` needs to reach this pool; sent around as `KVSource.endpoint`. Empty when peers need
        nothing.
        """
        ...

    async def publish(self, blocks: Sequence[NamedBlock]) -> None:
        """Make blocks fetchable. The caller keeps them pinned and unchanged until this returns. Publishing a block
        again is allowed and costs next to nothing. Raises KVError when none could be published."""
        ...

    def retract(self, block_ids: Sequence[int]) -> None:
        """These blocks are about to lose their content. Called from the engine thread, before it writes to them;
        returns at once. A fetch that overlaps finds the block missing, never wrong. A backend whose copies live
        elsewhere does nothing."""
        ...

    async def fetch(self, source: KVSource | None, blocks: Sequence[NamedBlock], *, timeout: float) -> FetchResult:
        """Copy blocks by name into the local pool at their `block_id`. `source` None asks only what is shared by all
        (Redis).

        The caller has reserved and pinned every destination. On return and on any exception, cancellation included,
        nothing writes to the destinations any more. A block whose outcome is not FETCHED has undefined content."""
        ...

    async def close(self) -> None:
        """Release the pool memory and everything left in the system (segments, connections). Idempotent."""
        ...


class HostConnector(KVConnector, Protocol):
    """A backend, whose pool is host memory. `allocate` first, exactly once. A pool on a device is served through one of
    these by a `StagedConnector`."""

    def allocate(
        self, layout: KVLayout, num_blocks: int, *, node_id: str, epoch: int, buffer: PoolBuffer | None = None
    ) -> PoolBuffer:
        """Memory for the pool, zeroed, that this connector can serve from; or `buffer`, memory of that shape which
        belongs to another connector, is served from and stays until after `close`. Raises ConfigurationError when there
        is not enough, or when this backend can only serve from its own.
        """
        ...
