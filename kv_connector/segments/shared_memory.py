"""The default connector on one host: every pool is a segment that peers map read-only and copy from.

Copies, and digests of more than a few blocks, run on one worker thread, in slices, so that neither the event loop nor
the engine waits for them. Invariant: only the worker thread touches peers' mappings; our slots are filled by `publish`,
which nobody calls while another call of it runs, and voided by `retract`, from any thread.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kv_connector.base import Block, FetchOutcome, FetchResult, PoolBuffer, Source
from kv_connector.pool import CopyRows, LocalPool, Slices
from kv_connector.segments.mapped_peers import MappedPeers, open_segment, sweep_and_log
from kv_connector.segments.prefault import Prefault
from kv_connector.segments.segment import OwnedSegment, PeerSegment, check_peer, default_directory
from kv_connector.settings import SharedMemorySettings
from kv_connector.stats import ConnectorStats
from kv_connector.verdict import Verdict, Verdicts
from kv_connector.worker import Worker
from kvrelay.core.block_hash import BlockHash
from kvrelay.core.clock import Clock, MonotonicClock
from kvrelay.core.errors import ConfigurationError, KVError
from kvrelay.core.kv_layout import KVLayout

_SLICE_BYTES = 16 << 20  # a few milliseconds of copying
# Blocks that a decode step has just filled are described in less time than the way to another thread and back takes, on
# which the interpreter is taken from the engine twice.
_AT_ONCE_BYTES = 512 << 10
_AT_ONCE_BLOCKS = 32

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Open:
    """What exists between `allocate` and `close`."""

    segment: OwnedSegment
    pool: LocalPool
    epoch: int
    worker: Worker
    prefault: Prefault
    copy: CopyRows
    peers: MappedPeers[PeerSegment]


@dataclass(frozen=True, slots=True)
class _Holder:
    """A peer and where in it the wanted names were found."""

    peer: PeerSegment
    epoch: int
    slots: dict[BlockHash, list[int]]


class SharedMemoryConnector:
    """Implements HostConnector. The endpoint is the segment's file name: peers look in their own directory and nowhere
    else.
    """

    name = "shared_memory"
    has_store = False

    def __init__(
        self, settings: SharedMemorySettings, *, clock: Clock | None = None, look_interval: float = 1.0
    ) -> None:
        """`look_interval`: seconds between two looks whether the owners of mapped segments live."""
        self.stats = ConnectorStats()
        self._look_interval = look_interval
        self._copy = settings.copy
        self._directory = Path(settings.directory) if settings.directory is not None else default_directory()
        self._clock: Clock = clock or MonotonicClock()
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
        peers = MappedPeers[PeerSegment](worker.run, self._look_interval)
        self._state = _Open(segment, pool, epoch, worker, Prefault(pool.rows), self._copy, peers)
        return pool.buffer

    @property
    def endpoint(self) -> str:
        return self._require().segment.path.name

    async def publish(self, blocks: Sequence[Block]) -> None:
        for part in Slices(blocks, self._require().pool.block_bytes, _SLICE_BYTES):
            state = self._require()
            if len(part) <= _AT_ONCE_BLOCKS and len(part) * state.pool.block_bytes <= _AT_ONCE_BYTES:
                published = _publish(state, part)
            else:
                published = await state.worker.run(_publish, state, part)
            self.stats.count_published(published, state.pool.block_bytes)

    def retract(self, block_ids: Sequence[int]) -> None:
        state = self._state
        if state is not None:
            state.segment.clear(block_ids)

    async def fetch(self, source: Source | None, blocks: Sequence[Block], *, timeout: float) -> FetchResult:
        verdicts = Verdicts(len(blocks), timeout=timeout, clock=self._clock)
        block_bytes = self._require().pool.block_bytes
        if source is None or not blocks:
            verdicts.found += [FetchOutcome.MISSING] * len(blocks)
        else:
            state = self._require()
            parts = list(Slices(blocks, block_bytes, _SLICE_BYTES))
            first = parts.pop(0) if verdicts.seconds_left > 0 else ()
            holder, verdicts.found = await state.worker.run(self._find_and_read, state, source, blocks, first)
            self._require().peers.look_after_owners()
            for part in parts:
                if holder is None or verdicts.seconds_left <= 0:
                    break
                state = self._require()
                verdicts.found += await state.worker.run(_read, state, holder, part)
        return verdicts.settle(source, self.stats, block_bytes=block_bytes)

    async def close(self) -> None:
        state, self._state = self._state, None
        if state is None:
            return
        try:
            await state.peers.close()
        finally:
            state.worker.stop()
            state.prefault.stop()
            state.segment.close()
            state.pool.release()

    def _require(self) -> _Open:
        if self._state is None:
            raise KVError("the shared-memory connector is not allocated, or closed")
        return self._state

    def _find_and_read(
        self, state: _Open, source: Source, blocks: Sequence[Block], first: Sequence[Block]
    ) -> tuple[_Holder | None, list[Verdict]]:
        """Worker thread: where the blocks are, and verdicts of the `first` ones; of all without a holder."""
        holder = self._find(state, source, blocks)
        if isinstance(holder, _Holder):
            return holder, _read(state, holder, first)
        return None, [holder] * len(blocks)

    def _find(self, state: _Open, source: Source, blocks: Sequence[Block]) -> _Holder | Verdict:
        """Worker thread: the peer's mapping, and the wanted names in it."""
        peer = state.peers.get(source.endpoint)
        if peer is None:
            opened = open_segment(self._directory, source)
            if not isinstance(opened, PeerSegment):
                return opened
            state.peers.add(source.endpoint, peer := opened)
        mismatch = check_peer(peer, epoch=source.epoch, geometry=state.pool.geometry)
        if mismatch is not None:
            return mismatch
        return _Holder(peer, source.epoch, peer.find([block.block_hash for block in blocks]))


def _publish(state: _Open, blocks: Sequence[Block]) -> int:
    """How many slots were filled; one retracted meanwhile stays empty. On the worker thread; for few bytes the loop."""
    published = 0
    for block in blocks:
        if state.segment.holds(block):
            continue
        sequence = state.segment.sequence(block.block_id)
        header = state.pool.describe(block, state.epoch)
        published += state.segment.write(block.block_id, header, sequence)
    return published


def _read(state: _Open, holder: _Holder, blocks: Sequence[Block]) -> list[Verdict]:
    """Worker thread: one verdict per block. A name may be held by several slots; any good one will do."""
    if holder.peer.closed:  # the owner died and another fetch noticed first
        return [FetchOutcome.FAILED] * len(blocks)
    verdicts: list[Verdict] = [FetchOutcome.MISSING] * len(blocks)
    left = {index: list(holder.slots.get(block.block_hash, ())) for index, block in enumerate(blocks)}
    while left := {index: slots for index, slots in left.items() if slots}:
        slots = [candidates.pop(0) for candidates in left.values()]
        wanted = [blocks[index] for index in left]
        tried = holder.peer.read(slots, wanted, state.pool.rows, epoch=holder.epoch, copy=state.copy)
        for index, verdict in zip(list(left), tried, strict=True):
            if verdict is not FetchOutcome.MISSING:
                verdicts[index] = verdict
            if verdict is FetchOutcome.FETCHED:
                del left[index]
    return verdicts
