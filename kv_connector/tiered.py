"""Several connectors over one pool: a fetch asks the first one, and the next one for the blocks that did not arrive.

The first tier allocates the pool, the others serve from the same memory. Tiers that reach the holder itself (shared
memory, UCX) come before a store (Redis), which needs no holder: only a fetch without a source asks it. Nodes of one
cluster may have different tiers; they exchange blocks through those that they share. A node of one backend has a tier,
too, so that all understand each other's endpoints.

Invariant: a fetch takes no longer than its timeout, and a tier that hangs leaves time for the next; publishing waits
for no store behind another tier, and fails only if all tiers fail.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Generic, TypeVar

from kv_connector.base import FetchOutcome, FetchOutcomes, HostConnector, KVConnector, PoolBuffer
from kv_connector.cost_gate import CostGate, RecomputeSeconds
from kv_connector.device.base import DeviceConnector
from kv_connector.device.pool import DevicePool
from kv_connector.stats import ConnectorStats
from kvrelay.core.clock import Clock, MonotonicClock
from kvrelay.core.errors import KVError
from kvrelay.core.kv.block_hash import BlockHash
from kvrelay.core.kv.connectors import needs_same_host
from kvrelay.core.kv.endpoints import Endpoints, parse_endpoints, this_host
from kvrelay.core.kv.layout import KVLayout
from kvrelay.core.kv.named_block import NamedBlock
from kvrelay.core.kv.source import KVSource
from kvrelay.core.outages import Outages

_SHARE = 0.5  # of the time left, for a tier that is not the last one
# Of what several tiers report of a block that does not arrive, the last one in this order is passed on. A tier that
# does not get through says nothing of the holder if another one does: between containers that do not share /dev/shm,
# shared memory always fails.
_SEVERITY = (FetchOutcome.FAILED, FetchOutcome.MISSING, FetchOutcome.REFUSED)

_logger = logging.getLogger(__name__)


TierT_co = TypeVar("TierT_co", bound=KVConnector, covariant=True)


class TieredConnector(Generic[TierT_co]):
    """Implements HostConnector or DeviceConnector with several connectors of that kind, which it owns."""

    def __init__(
        self,
        tiers: Sequence[TierT_co],
        *,
        recompute_seconds: RecomputeSeconds = lambda num_tokens: None,
        clock: Clock | None = None,
        host: str | None = None,
    ) -> None:
        """`tiers`: in the order of asking, not yet allocated. `recompute_seconds`: how long computing would take
        instead of asking a store. `host`: the machine's id, if it is to differ from `this_host`."""
        assert tiers
        self.name = ",".join(tier.name for tier in tiers)
        self.has_store = any(tier.has_store for tier in tiers)
        self.tiers = tuple(tiers)
        self._clock: Clock = clock or MonotonicClock()
        self._outages = Outages(self._clock.now)
        self._host = host or this_host()
        self._device_pool: DevicePool | None = None
        self._block_bytes = 0  # before `allocate` or `serve`, and after `close`
        # A store that is the only tier has no gate: without the store nodes would exchange nothing.
        self._gates = {tier.name: CostGate(recompute_seconds) for tier in self.tiers[1:] if tier.has_store}

    def all_stats(self) -> Mapping[str, ConnectorStats]:
        return {name: stats for tier in self.tiers for name, stats in tier.all_stats().items()}

    def allocate(
        self: "TieredConnector[HostConnector]",
        layout: KVLayout,
        num_blocks: int,
        *,
        node_id: str,
        epoch: int,
        buffer: PoolBuffer | None = None,
    ) -> PoolBuffer:
        for tier in self.tiers:
            buffer = tier.allocate(layout, num_blocks, node_id=node_id, epoch=epoch, buffer=buffer)
        assert buffer is not None
        self._block_bytes = layout.block_bytes
        return buffer

    def serve(self: "TieredConnector[DeviceConnector]", pool: DevicePool, *, node_id: str, epoch: int) -> None:
        """Implements `DeviceConnector.serve`. `close` also stops the pool."""
        self._device_pool = pool
        for tier in self.tiers:
            tier.serve(pool, node_id=node_id, epoch=epoch)
        self._block_bytes = pool.block_bytes

    @property
    def endpoint(self) -> str:
        found = {tier.name: tier.endpoint for tier in self.tiers if tier.endpoint}
        return Endpoints(self._host, found).encode() if found else ""

    async def publish(self, blocks: Sequence[NamedBlock]) -> None:
        """Publishes through every tier. A store behind other tiers queues the blocks and returns at once."""
        errors: list[KVError] = []
        for tier in self.tiers:
            try:
                await tier.publish(blocks)
            except KVError as failure:
                errors.append(failure)
        if len(errors) == len(self.tiers):
            raise errors[0]
        name = "publishing through every tier"
        for error in errors:
            message = "%d blocks are published through some tiers only: %s"
            self._outages.failed(name, message, len(blocks), error)
        if not errors:
            self._outages.succeeded(name)

    def retract(self, block_ids: Sequence[int]) -> None:
        for tier in self.tiers:
            tier.retract(block_ids)

    async def discard(self, names: Sequence[BlockHash]) -> None:
        for tier in self.tiers:
            await tier.discard(names)

    async def finish_storing(self) -> None:
        for tier in self.tiers:
            await tier.finish_storing()

    async def fetch(self, source: KVSource | None, blocks: Sequence[NamedBlock], *, timeout: float) -> FetchOutcomes:
        if not self._block_bytes:
            raise KVError("the tiered connector is not allocated, or closed")
        deadline = self._clock.now() + timeout
        route = self._route(source)
        outcomes = [FetchOutcome.FAILED if route or source is not None else FetchOutcome.MISSING] * len(blocks)
        for position, (tier, tier_source) in enumerate(route):
            wanted = [index for index, outcome in enumerate(outcomes) if outcome is not FetchOutcome.FETCHED]
            left = deadline - self._clock.now()
            if not wanted or (position and left <= 0):
                break
            share = left if position == len(route) - 1 else left * _SHARE
            found = await self._ask(tier, tier_source, [blocks[index] for index in wanted], share)
            for index, outcome in zip(wanted, found, strict=True):
                outcomes[index] = _more_severe(outcomes[index], outcome)
        return tuple(outcomes)

    async def close(self) -> None:
        """Closes the tiers, that which owns the pool last."""
        self._block_bytes = 0
        async with AsyncExitStack() as stack:
            if self._device_pool is not None:
                stack.callback(self._device_pool.stop)
            for tier in self.tiers:
                stack.push_async_callback(tier.close)

    def _route(self, source: KVSource | None) -> list[tuple[TierT_co, KVSource | None]]:
        """Returns the tiers to ask, each with its own endpoint of the source. A fetch with a source asks no store."""
        if source is None or source.is_store_only:
            return [(tier, source) for tier in self.tiers if tier.has_store]
        try:
            found = parse_endpoints(source.endpoint)
        except KVError as error:
            name = f"asking node {source.node_id}"
            self._outages.failed(name, "node %s cannot be asked: %s", source.node_id, error)
            return []
        holders: list[tuple[TierT_co, KVSource | None]] = [
            (tier, replace(source, endpoint=found.by_name[tier.name]))
            for tier in self.tiers
            if tier.name in found.by_name and (found.host == self._host or not needs_same_host(tier.name))
        ]
        if not holders:
            _logger.debug("node %s cannot be reached through %s from here", source.node_id, self.name)
        return holders

    async def _ask(
        self, tier: KVConnector, source: KVSource | None, blocks: Sequence[NamedBlock], timeout: float
    ) -> Sequence[FetchOutcome]:
        gate = self._gates.get(tier.name)
        num_bytes = len(blocks) * self._block_bytes
        if gate is not None and not gate.opens(sum(block.num_tokens for block in blocks), num_bytes):
            tier.all_stats()[tier.name].not_worth += len(blocks)
            return [FetchOutcome.MISSING] * len(blocks)
        name = f"fetching through {tier.name}"
        started = self._clock.now()
        try:
            outcomes = await tier.fetch(source, blocks, timeout=timeout)
        except KVError as error:
            self._outages.failed(name, "fetching through %s failed: %s", tier.name, error)
            return [FetchOutcome.FAILED] * len(blocks)
        self._outages.succeeded(name)
        if gate is not None:
            fetched = outcomes.count(FetchOutcome.FETCHED)
            gate.observe(fetched * self._block_bytes, self._clock.now() - started)
        return outcomes


def _more_severe(one: FetchOutcome, other: FetchOutcome) -> FetchOutcome:
    """Returns what to report of a block after another tier was asked for it, whose outcome is `other`."""
    if other is FetchOutcome.FETCHED:
        return other
    return max(one, other, key=_SEVERITY.index)
