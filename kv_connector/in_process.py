"""The connector for nodes that share a process, in tests and the simulation. It behaves as those between processes do.

Invariant: a block is reported as fetched only if its header was still visible (see `shared_pool.py`) after the copy.
"""

import asyncio
from collections.abc import Mapping, Sequence

from kv_connector.base import FetchOutcome, FetchOutcomes, PoolBuffer, WithoutStore
from kv_connector.header import Mismatch
from kv_connector.pool import CopyPayload, LocalPool, copy_payload, slices
from kv_connector.shared_pool import SharedPool
from kv_connector.stats import ConnectorStats
from kv_connector.verdict import Verdict, Verdicts
from kvrelay.core.clock import Clock, MonotonicClock
from kvrelay.core.errors import KVError
from kvrelay.core.kv.layout import KVLayout
from kvrelay.core.kv.named_block import NamedBlock
from kvrelay.core.kv.source import KVSource
from kvrelay.core.outages import Outages

_SLICE_BYTES = 1 << 20  # copied on the loop, which runs others after each


class InProcessHub:
    """The pools that can reach each other, like those of one host."""

    def __init__(self) -> None:
        self.pools: dict[str, SharedPool[LocalPool]] = {}


class InProcessConnector(WithoutStore):
    """Implements HostConnector between the nodes of one hub. `copy` copies a payload and digests what arrived."""

    name = "in_process"

    def __init__(self, hub: InProcessHub, *, clock: Clock | None = None, copy: CopyPayload = copy_payload) -> None:
        self.stats = ConnectorStats()
        self._hub = hub
        self._copy = copy
        self._clock: Clock = clock or MonotonicClock()
        self._outages = Outages(self._clock.now)
        self._shared: SharedPool[LocalPool] | None = None
        self._endpoint = ""

    def all_stats(self) -> Mapping[str, ConnectorStats]:
        return {self.name: self.stats}

    def allocate(
        self, layout: KVLayout, num_blocks: int, *, node_id: str, epoch: int, buffer: PoolBuffer | None = None
    ) -> PoolBuffer:
        assert self._shared is None, "allocate is called once"
        pool = LocalPool.over(buffer, layout, num_blocks)
        self._shared = SharedPool(pool, epoch)
        self._endpoint = f"{node_id}-{epoch:016x}"
        self._hub.pools[self._endpoint] = self._shared
        return pool.buffer

    @property
    def endpoint(self) -> str:
        return self._endpoint

    async def publish(self, blocks: Sequence[NamedBlock]) -> None:
        for part in slices(blocks, self._require().pool.block_bytes, _SLICE_BYTES):
            shared = self._require()
            self.stats.count_published(await shared.publish(part), shared.pool.block_bytes)
            await asyncio.sleep(0)

    def retract(self, block_ids: Sequence[int]) -> None:
        shared = self._shared
        if shared is not None:
            shared.remove(block_ids)

    async def fetch(self, source: KVSource | None, blocks: Sequence[NamedBlock], *, timeout: float) -> FetchOutcomes:
        verdicts = Verdicts(len(blocks), timeout=timeout, clock=self._clock)
        block_bytes = self._require().pool.block_bytes
        for part in slices(blocks, block_bytes, _SLICE_BYTES):
            if verdicts.seconds_left <= 0:
                break
            verdicts.found += self._read(source, part)
            await asyncio.sleep(0)
        return verdicts.settle(source, self.stats, self._outages, block_bytes=block_bytes)

    async def close(self) -> None:
        shared, self._shared = self._shared, None
        if shared is not None:
            del self._hub.pools[self._endpoint]
            shared.remove(range(shared.pool.num_blocks))
            shared.pool.release()

    def _require(self) -> SharedPool[LocalPool]:
        if self._shared is None:
            raise KVError("the in-process connector is not allocated, or closed")
        return self._shared

    def _read(self, source: KVSource | None, blocks: Sequence[NamedBlock]) -> list[Verdict]:
        local = self._require()
        if source is None:
            return [FetchOutcome.MISSING] * len(blocks)
        peer = self._hub.pools.get(source.endpoint)
        if peer is None:
            return [FetchOutcome.FAILED] * len(blocks)
        if peer.epoch != source.epoch:
            return [Mismatch.EPOCH] * len(blocks)
        return [_read_block(local, peer, block, self._copy) for block in blocks]


def _read_block(
    local: SharedPool[LocalPool], peer: SharedPool[LocalPool], block: NamedBlock, copy: CopyPayload
) -> Verdict:
    """Copies a block and returns the verdict. Several blocks may have a name; any good one will do."""
    verdict: Verdict = FetchOutcome.MISSING
    for block_id, header in peer.find(block.block_hash):
        mismatch = local.pool.geometry.verify(header, block, epoch=peer.epoch)
        if mismatch is None:
            digest = copy(local.pool.rows[block.block_id], peer.pool.rows[block_id])
            mismatch = header.verify_payload(digest)
        if not peer.shows(block_id, header):
            continue  # retracted during the copy, without anybody's fault: missing
        if mismatch is None:
            return FetchOutcome.FETCHED
        verdict = mismatch
    return verdict
