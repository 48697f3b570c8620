"""The connector for pools in device memory on one host: peers map each other's pools and copy from device to device.

Headers are in a segment of host memory, as with `shared_memory`, and with them what lets peers map the pool (for CUDA,
its IPC handle): only processes of the same user can read that file. A header is written when its block is complete on
the device. Nothing here knows CUDA; that is the `DirectMemory`'s.
Invariant: only the device's thread touches peers' pools, and a block counts as fetched only by the digest of what lies
in our own memory, with the slot unchanged before and after the copy.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kv_connector.base import Block, FetchOutcome, FetchResult, Source
from kv_connector.device.memory import MAX_HANDLE_BYTES, BlockCopy, PeerMemory
from kv_connector.device.pool import DevicePool
from kv_connector.header import Mismatch
from kv_connector.pool import Slices
from kv_connector.segments.mapped_peers import MappedPeers, open_segment, sweep_and_log
from kv_connector.segments.segment import Look, OwnedSegment, PeerSegment, check_peer, default_directory
from kv_connector.settings import SharedMemorySettings
from kv_connector.stats import ConnectorStats
from kv_connector.verdict import Verdict, Verdicts
from kvrelay.core.block_hash import BlockHash
from kvrelay.core.clock import Clock, MonotonicClock
from kvrelay.core.errors import KVError

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Peer:
    segment: PeerSegment
    memory: PeerMemory

    def owner_is_alive(self) -> bool:
        return self.segment.owner_is_alive()

    def close(self) -> None:
        self.memory.close()
        self.segment.close()


@dataclass(slots=True)
class _Open:
    """What exists between `serve` and `close`."""

    segment: OwnedSegment
    pool: DevicePool
    epoch: int
    peers: MappedPeers[_Peer]


@dataclass(frozen=True, slots=True)
class _Holder:
    """A peer and where in it the wanted names were found."""

    peer: _Peer
    epoch: int
    slots: dict[BlockHash, list[int]]


class CudaIpcConnector:
    """Implements DeviceConnector. The endpoint is the segment's file name, in the directory that all nodes of a host
    share."""

    name = "cuda_ipc"
    has_store = False

    def __init__(
        self, settings: SharedMemorySettings, *, clock: Clock | None = None, look_interval: float = 1.0
    ) -> None:
        """`look_interval`: seconds between two looks whether the owners of mapped pools live."""
        self.stats = ConnectorStats()
        self._look_interval = look_interval
        self._directory = Path(settings.directory) if settings.directory is not None else default_directory()
        self._clock: Clock = clock or MonotonicClock()
        self._state: _Open | None = None

    def all_stats(self) -> Mapping[str, ConnectorStats]:
        return {self.name: self.stats}

    def serve(self, pool: DevicePool, *, node_id: str, epoch: int) -> None:
        assert self._state is None, "serve is called once"
        sweep_and_log(self._directory)
        handle = pool.memory.export()
        assert len(handle) <= MAX_HANDLE_BYTES
        segment = OwnedSegment(self._directory, node_id, epoch, pool.layout, pool.num_blocks, device_handle=handle)
        self._state = _Open(segment, pool, epoch, MappedPeers[_Peer](pool.run, self._look_interval))

    @property
    def endpoint(self) -> str:
        return self._require().segment.path.name

    async def publish(self, blocks: Sequence[Block]) -> None:
        pool = self._require().pool
        for part in Slices(blocks, pool.block_bytes, pool.slice_bytes):
            published = await self._publish(self._require(), part)
            self.stats.count_published(published, pool.block_bytes)

    def retract(self, block_ids: Sequence[int]) -> None:
        state = self._state
        if state is not None:
            state.segment.clear(block_ids)

    async def fetch(self, source: Source | None, blocks: Sequence[Block], *, timeout: float) -> FetchResult:
        verdicts = Verdicts(len(blocks), timeout=timeout, clock=self._clock)
        pool = self._require().pool
        if source is None or not blocks:
            verdicts.found += [FetchOutcome.MISSING] * len(blocks)
        else:
            holder = await self._require().pool.run(self._find, self._require(), source, blocks)
            self._require().peers.look_after_owners()
            if not isinstance(holder, _Holder):
                verdicts.found += [holder] * len(blocks)
            else:
                for part in Slices(blocks, pool.block_bytes, pool.slice_bytes):
                    if verdicts.seconds_left <= 0:
                        break
                    state = self._require()
                    verdicts.found += await state.pool.run(_read, state, holder, part)
        return verdicts.settle(source, self.stats, block_bytes=pool.block_bytes)

    async def close(self) -> None:
        state, self._state = self._state, None
        if state is None:
            return
        try:
            await state.peers.close()
        finally:
            state.segment.close()
            with suppress(BufferError):  # the engine is retracting from it just now
                state.segment.mapping.close()

    def _require(self) -> _Open:
        if self._state is None:
            raise KVError("the CUDA IPC connector does not serve a pool, or is closed")
        return self._state

    async def _publish(self, state: _Open, blocks: Sequence[Block]) -> int:
        """How many slots were filled; one retracted meanwhile stays empty."""
        segment = state.segment
        fresh = [(block, segment.sequence(block.block_id)) for block in blocks if not segment.holds(block)]
        headers = await state.pool.describe_all([block for block, _ in fresh], state.epoch)
        if self._state is not state:
            raise KVError("the CUDA IPC connector was closed")
        return sum(
            segment.write(block.block_id, header, sequence)
            for (block, sequence), header in zip(fresh, headers, strict=True)
        )

    def _find(self, state: _Open, source: Source, blocks: Sequence[Block]) -> _Holder | Verdict:
        """Device's thread: the peer's pool, mapped, and the wanted names in it."""
        peer = state.peers.get(source.endpoint)
        if peer is None:
            opened = self._open_peer(state, source)
            if not isinstance(opened, _Peer):
                return opened
            state.peers.add(source.endpoint, peer := opened)
        mismatch = _check(state.pool, peer.segment, source)
        if mismatch is not None:
            return mismatch
        return _Holder(peer, source.epoch, peer.segment.find([block.block_hash for block in blocks]))

    def _open_peer(self, state: _Open, source: Source) -> _Peer | Verdict:
        segment = open_segment(self._directory, source, on_device=True)
        if not isinstance(segment, PeerSegment):
            return segment
        verdict: Verdict | None = _check(state.pool, segment, source)
        if verdict is None:
            try:
                return _Peer(segment, state.pool.memory.open(segment.device_handle, segment.preamble.num_blocks))
            except KVError as error:
                _logger.warning(
                    "can not map the device memory of node %s: %s; if no other connector reaches it, set "
                    "--kv-device-transfer staged for both",
                    source.node_id, error,
                )  # fmt: skip
                verdict = FetchOutcome.FAILED
        segment.close()
        return verdict


def _check(pool: DevicePool, segment: PeerSegment, source: Source) -> Mismatch | None:
    return check_peer(segment, epoch=source.epoch, geometry=pool.geometry)


def _read(state: _Open, holder: _Holder, blocks: Sequence[Block]) -> list[Verdict]:
    """Device's thread: one verdict per block. A name may be held by several slots; any good one will do."""
    if holder.peer.segment.closed:  # the owner died and another fetch noticed first
        return [FetchOutcome.FAILED] * len(blocks)
    verdicts: list[Verdict] = [FetchOutcome.MISSING] * len(blocks)
    candidates = {index: iter(holder.slots.get(block.block_hash, ())) for index, block in enumerate(blocks)}
    while candidates:
        looks = _look_at(holder, blocks, candidates, verdicts)
        if not looks:
            break
        ids = [blocks[index].block_id for index in looks]
        copies = [BlockCopy(block_id, look.slot) for block_id, look in zip(ids, looks.values(), strict=True)]
        state.pool.memory.copy_from(holder.peer.memory, copies)
        for (index, look), digest in zip(looks.items(), state.pool.memory.digests(ids), strict=True):
            _note(verdicts, index, holder.peer.segment.judge(look, digest))
            if verdicts[index] is FetchOutcome.FETCHED:
                del candidates[index]
    return verdicts


def _look_at(
    holder: _Holder, blocks: Sequence[Block], candidates: dict[int, Iterator[int]], verdicts: list[Verdict]
) -> dict[int, Look]:
    """By index: the next slot of each block that is worth a copy. Those that have none are no candidates any more."""
    looks: dict[int, Look] = {}
    for index, slots in list(candidates.items()):
        for slot in slots:
            look = holder.peer.segment.look(slot, blocks[index], epoch=holder.epoch)
            if isinstance(look, Look):
                looks[index] = look
                break
            _note(verdicts, index, look)
        else:
            del candidates[index]
    return looks


def _note(verdicts: list[Verdict], index: int, verdict: Verdict) -> None:
    if verdict is not FetchOutcome.MISSING:
        verdicts[index] = verdict
