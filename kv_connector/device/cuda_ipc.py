"""The connector for pools in device memory on one host: peers map each other's pools and copy from device to device.

A segment of host memory holds the headers, as with `shared_memory`, and the handle with which peers map the pool (for
CUDA, its IPC handle): only processes of the same user can read that file. A header is written when its block is
complete on the device. Only the `DirectMemory` knows CUDA, this module does not.
Invariant: only the device's thread touches peers' pools. A block counts as fetched only if the digest of what is in our
own memory is right and its slot was the same before and after the copy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from kv_connector.base import FetchOutcome, FetchOutcomes, WithoutStore
from kv_connector.device.memory import BlockCopy, PeerMemory
from kv_connector.device.pool import DevicePool
from kv_connector.pool import slices
from kv_connector.segments.mapped_peers import MappedPeer, MappedPeers, open_segment, sweep_and_log
from kv_connector.segments.reader import SegmentReader
from kv_connector.segments.segment import OwnedSegment, PeerSegment, segment_directory
from kv_connector.settings import SharedMemorySettings
from kv_connector.stats import ConnectorStats
from kv_connector.verdict import Verdict
from kvrelay.core.clock import MonotonicClock
from kvrelay.core.errors import KVError
from kvrelay.core.kv.named_block import NamedBlock
from kvrelay.core.kv.source import KVSource
from kvrelay.core.outages import Outages


@dataclass(frozen=True, slots=True)
class _DevicePeer(MappedPeer):
    memory: PeerMemory

    def close(self) -> None:
        self.memory.close()
        self.segment.close()


@dataclass(slots=True)
class _Open:
    """The state between `serve` and `close`."""

    segment: OwnedSegment
    pool: DevicePool
    epoch: int
    reader: SegmentReader[_DevicePeer]


class CudaIpcConnector(WithoutStore):
    """Implements DeviceConnector. The endpoint is the segment's file name, in the directory that all nodes of a host
    share."""

    name = "cuda_ipc"

    def __init__(self, settings: SharedMemorySettings) -> None:
        self.stats = ConnectorStats()
        self._directory = segment_directory(settings)
        self._clock = MonotonicClock()
        self._outages = Outages(self._clock.now)
        self._state: _Open | None = None

    def all_stats(self) -> Mapping[str, ConnectorStats]:
        return {self.name: self.stats}

    def serve(self, pool: DevicePool, *, node_id: str, epoch: int) -> None:
        assert self._state is None, "serve is called once"
        sweep_and_log(self._directory)
        handle = pool.memory.export()
        segment = OwnedSegment(self._directory, node_id, epoch, pool.layout, pool.num_blocks, device_handle=handle)

        def copy(peer: _DevicePeer, block_ids: Sequence[int], slots: Sequence[int]) -> Sequence[bytes]:
            pool.memory.copy_from(peer.memory, [BlockCopy(*pair) for pair in zip(block_ids, slots, strict=True)])
            return pool.memory.digests(block_ids)

        peers = MappedPeers(partial(self._open_peer, pool), pool)
        reader = SegmentReader(
            pool, peers, copy, thread=pool, slice_bytes=pool.slice_bytes, stats=self.stats, clock=self._clock
        )
        self._state = _Open(segment, pool, epoch, reader)

    @property
    def endpoint(self) -> str:
        return self._require().segment.path.name

    async def publish(self, blocks: Sequence[NamedBlock]) -> None:
        pool = self._require().pool
        for part in slices(blocks, pool.block_bytes, pool.slice_bytes):
            published = await self._publish(self._require(), part)
            self.stats.count_published(published, pool.block_bytes)

    def retract(self, block_ids: Sequence[int]) -> None:
        state = self._state
        if state is not None:
            state.segment.slots.clear(block_ids)

    async def fetch(self, source: KVSource | None, blocks: Sequence[NamedBlock], *, timeout: float) -> FetchOutcomes:
        return await self._require().reader.fetch(source, blocks, timeout=timeout)

    async def close(self) -> None:
        state, self._state = self._state, None
        if state is None:
            return
        try:
            await state.reader.close()
        finally:
            state.segment.close()
            state.segment.mapping.close()

    def _require(self) -> _Open:
        if self._state is None:
            raise KVError("the CUDA IPC connector does not serve a pool, or is closed")
        return self._state

    async def _publish(self, state: _Open, blocks: Sequence[NamedBlock]) -> int:
        """Fills the slots of blocks that are not published yet; returns how many."""
        state.segment.check_present()
        absent = state.segment.slots.absent(blocks)
        headers = await state.pool.describe_all([block for block, _ in absent], state.epoch)
        if self._state is not state:
            raise KVError("the CUDA IPC connector was closed")
        return state.segment.slots.fill(absent, headers)

    def _open_peer(self, pool: DevicePool, source: KVSource) -> _DevicePeer | Verdict:
        """Maps a peer, or returns why it cannot be. Called on the device's thread."""
        segment = open_segment(self._directory, source, self._outages, on_device=True)
        if not isinstance(segment, PeerSegment):
            return segment
        verdict: Verdict | None = segment.mismatch(source, pool.geometry)
        if verdict is None:
            try:
                return _DevicePeer(segment, pool.memory.open(segment.device_handle, segment.preamble.num_blocks))
            except KVError as error:
                self._outages.failed(
                    f"mapping the device memory of node {source.node_id}",
                    "cannot map the device memory of node %s: %s; if no other connector reaches it, set "
                    "--kv-device-transfer staged for both",
                    source.node_id, error,
                )  # fmt: skip
                verdict = FetchOutcome.FAILED
        segment.close()
        return verdict
