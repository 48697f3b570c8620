"""The default connector on one host: every pool is a segment that peers map read-only and copy from.

Copies, and digests of more than a few blocks, run on one worker thread, in slices, so that neither the event loop nor
the engine waits for them.
Invariant: only the worker thread touches peers' mappings. Our slots are filled by `publish` and cleared by `retract`,
from any thread.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kv_connector.base import FetchOutcomes, PoolBuffer, WithoutStore
from kv_connector.pool import CopyRows, LocalPool, copy_rows, slices
from kv_connector.segments.mapped_peers import MappedPeer, MappedPeers, open_segment, sweep_and_log
from kv_connector.segments.prefault import Prefault
from kv_connector.segments.reader import SegmentReader
from kv_connector.segments.segment import OwnedSegment, PeerSegment, segment_directory
from kv_connector.settings import SharedMemorySettings
from kv_connector.stats import ConnectorStats
from kv_connector.verdict import Verdict
from kv_connector.worker import Worker
from kvrelay.core.clock import Clock, MonotonicClock
from kvrelay.core.errors import ConfigurationError, KVError
from kvrelay.core.kv.layout import KVLayout
from kvrelay.core.kv.named_block import NamedBlock
from kvrelay.core.kv.source import KVSource
from kvrelay.core.outages import Outages

_SLICE_BYTES = 16 << 20  # a few milliseconds of copying
# Up to this much is digested on the loop: it takes less time than a switch to another thread and back, which would also
# take the interpreter from the engine twice. Blocks that a decode step has just filled are no more.
_AT_ONCE_BYTES = 512 << 10
_AT_ONCE_BLOCKS = 32


@dataclass(slots=True)
class _Open:
    """The state between `allocate` and `close`."""

    segment: OwnedSegment
    pool: LocalPool
    epoch: int
    worker: Worker
    prefault: Prefault
    reader: SegmentReader[MappedPeer]


class SharedMemoryConnector(WithoutStore):
    """Implements HostConnector. The endpoint is the segment's file name, in the directory that is configured at the
    peer."""

    name = "shared_memory"

    def __init__(
        self, settings: SharedMemorySettings, *, copy: CopyRows = copy_rows, clock: Clock | None = None
    ) -> None:
        """`copy` copies blocks out of a peer's segment."""
        self.stats = ConnectorStats()
        self._copy = copy
        self._directory = segment_directory(settings)
        self._clock: Clock = clock or MonotonicClock()
        self._outages = Outages(self._clock.now)
        self._state: _Open | None = None

    def all_stats(self) -> Mapping[str, ConnectorStats]:
        return {self.name: self.stats}

    def allocate(
        self, layout: KVLayout, num_blocks: int, *, node_id: str, epoch: int, buffer: PoolBuffer | None = None
    ) -> PoolBuffer:
        assert self._state is None, "allocate is called once"
        if buffer is not None:
            raise ConfigurationError("connector 'shared_memory' must come first: peers map the pool that it allocates")
        sweep_and_log(self._directory)
        segment = OwnedSegment(self._directory, node_id, epoch, layout, num_blocks)
        pool = LocalPool.inside(segment.mapping, segment.preamble.pool_offset, layout, num_blocks)
        worker = Worker("kv-shared-memory")
        peers = MappedPeers(self._open_peer, worker)

        def copy(peer: MappedPeer, block_ids: Sequence[int], slots: Sequence[int]) -> Sequence[bytes]:
            return self._copy(pool.rows, block_ids, peer.segment.rows, slots)

        reader = SegmentReader(pool, peers, copy, worker, slice_bytes=_SLICE_BYTES, stats=self.stats, clock=self._clock)
        self._state = _Open(segment, pool, epoch, worker, Prefault(pool.rows), reader)
        return pool.buffer

    @property
    def endpoint(self) -> str:
        return self._require().segment.path.name

    async def publish(self, blocks: Sequence[NamedBlock]) -> None:
        for part in slices(blocks, self._require().pool.block_bytes, _SLICE_BYTES):
            state = self._require()
            if len(part) <= _AT_ONCE_BLOCKS and len(part) * state.pool.block_bytes <= _AT_ONCE_BYTES:
                published = _publish(state, part)
            else:
                published = await state.worker.run(_publish, state, part)
            self.stats.count_published(published, state.pool.block_bytes)

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
            state.worker.stop()
            state.prefault.stop()
            state.segment.close()
            state.pool.release()

    def _require(self) -> _Open:
        if self._state is None:
            raise KVError("the shared-memory connector is not allocated, or closed")
        return self._state

    def _open_peer(self, source: KVSource) -> MappedPeer | Verdict:
        """Maps a peer, or returns why it cannot be. Called on the worker thread."""
        segment = open_segment(self._directory, source, self._outages)
        return MappedPeer(segment) if isinstance(segment, PeerSegment) else segment


def _publish(state: _Open, blocks: Sequence[NamedBlock]) -> int:
    """Fills the slots of blocks that are not published yet; returns how many. Runs on the worker thread, or on the
    loop when there is little to digest."""
    state.segment.check_present()
    absent = state.segment.slots.absent(blocks)
    return state.segment.slots.fill(absent, [state.pool.describe(block, state.epoch) for block, _ in absent])
