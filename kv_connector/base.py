"""The connector seam: how a node publishes blocks of its pool by name, and fetches blocks of others.

Transfers are pull only. Nobody writes into a pool from outside: `fetch` copies into blocks that the caller reserved,
and when it returns or raises, nothing writes to them any more. Every block travels with a `BlockHeader` (see
`header.py`); one that is not the requested block is never reported as fetched.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from kv_connector.stats import ConnectorStats
from kvrelay.core.errors import KVError
from kvrelay.core.kv.block_hash import BlockHash
from kvrelay.core.kv.layout import KVLayout
from kvrelay.core.kv.named_block import NamedBlock
from kvrelay.core.kv.source import KVSource


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
    MISSING = "missing"  # the source does not hold it, or no longer does
    REFUSED = "refused"  # it arrived but did not pass verification; counted and logged
    FAILED = "failed"  # the source could not be reached


FetchOutcomes = tuple[FetchOutcome, ...]
"""One outcome per requested block, in order."""


class AccessDeniedError(KVError):
    """A store does not accept our name and password, which waiting does not change."""


class KVConnector(Protocol):
    """The connector of a node, over a pool that exists already. Called from the node's asyncio loop unless stated
    otherwise.

    No method blocks the loop for longer than it takes to copy a few blocks, and none waits without a deadline. Methods
    that move data report an outcome per block; they raise `KVError` only when they know nothing about any block.
    """

    name: str
    has_store: bool
    """Tells whether blocks are also published to a store that all nodes share, which a `fetch` without a source asks.
    A store may forget a block that the pool still holds, so publish again what a request has found by name."""

    def all_stats(self) -> Mapping[str, ConnectorStats]:
        """Returns the counters of every backend in use, by the backend's name: its own, or those of each tier."""
        ...

    @property
    def endpoint(self) -> str:
        """Returns the address of this pool for a peer's `fetch`, distributed as `KVSource.endpoint`. Empty when peers
        need none."""
        ...

    async def publish(self, blocks: Sequence[NamedBlock]) -> None:
        """Makes blocks fetchable. The caller keeps them pinned and unchanged until this returns. Publishing a block
        again is allowed and costs next to nothing. Raises KVError when none could be published, AccessDeniedError if
        that is why."""
        ...

    def retract(self, block_ids: Sequence[int]) -> None:
        """Withdraws blocks that are about to lose their content. Called before anybody writes to them, from the engine
        thread or the loop, but never for one block from both at a time; returns at once. A fetch or a publication that
        overlaps leaves the block missing, never wrong. Copies that a backend keeps elsewhere stay."""
        ...

    async def discard(self, names: Sequence[BlockHash]) -> None:
        """Deletes blocks from the store that all nodes share, if there is one: their content may be wrong, although it
        is what was published. What this node is storing meanwhile is deleted as well, unless the store hangs; another
        node may store it again. Does not raise KVError."""
        ...

    async def finish_storing(self) -> None:
        """Returns when everything published so far was offered to the store that all nodes share, if there is one: one
        behind another connector takes its time. Has no deadline; a store that fails or hangs lacks blocks afterwards,
        and each of its exchanges has a deadline. Does not raise KVError."""
        ...

    async def fetch(self, source: KVSource | None, blocks: Sequence[NamedBlock], *, timeout: float) -> FetchOutcomes:
        """Copies blocks by name into the local pool at their `block_id`, in at most `timeout` seconds. Without a
        `source` only a store that all nodes share is asked.

        The caller has reserved and pinned every destination. On return and on any exception, cancellation included,
        nothing writes to the destinations any more. A block whose outcome is not FETCHED has undefined content."""
        ...

    async def close(self) -> None:
        """Releases the pool memory and everything left in the system (segments, connections). Idempotent."""
        ...


class WithoutStore:
    """What a backend that has no store does about one. A base of such backends."""

    has_store = False

    async def discard(self, names: Sequence[BlockHash]) -> None:
        """Does nothing: `retract` has withdrawn the blocks."""

    async def finish_storing(self) -> None:
        """Does nothing: nothing is stored."""


class HostConnector(KVConnector, Protocol):
    """A backend for a pool in host memory. Call `allocate` first, exactly once. A `StagedConnector` serves a pool on a
    device through such a backend."""

    def allocate(
        self, layout: KVLayout, num_blocks: int, *, node_id: str, epoch: int, buffer: PoolBuffer | None = None
    ) -> PoolBuffer:
        """Returns zeroed memory for the pool, from which this connector serves. With `buffer` it serves from that
        memory of another connector instead, which has this shape and stays until after `close`. Raises
        ConfigurationError when there is not enough memory, or when this backend can only serve from its own."""
        ...
