"""Fetches from other nodes' segments: blocks are found by name, copied into our pool, and judged by their slots.

The connector decides where the peers' pools are, in the segments or on a device, and how bytes are copied from there.
Invariant: only the connector's thread touches mapped memory, and it is never held for more than one part of a fetch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

from kv_connector.base import FetchOutcome, FetchOutcomes
from kv_connector.header import Mismatch
from kv_connector.payloads import Payloads
from kv_connector.pool import slices
from kv_connector.segments.mapped_peers import MappedPeers, PeerT
from kv_connector.stats import ConnectorStats
from kv_connector.verdict import Verdict, Verdicts
from kv_connector.worker import RunsFunctions
from kvrelay.core.block_hash import BlockHash
from kvrelay.core.clock import Clock
from kvrelay.core.errors import KVError
from kvrelay.core.kv_source import KVSource
from kvrelay.core.named_block import NamedBlock

CopyBlocks = Callable[[PeerT, Sequence[int], Sequence[int]], Sequence[bytes]]
"""Copies blocks from a peer: (peer, our block ids, the peer's slots). Returns the digests of what arrived."""


@dataclass(frozen=True, slots=True)
class _Holder(Generic[PeerT]):
    """A peer, and the slots in which the wanted names were found, as `PeerSlots.find` returns them."""

    peer: PeerT
    epoch: int
    slots: Sequence[Mapping[BlockHash, int]]


class SegmentReader(Generic[PeerT]):
    """The fetches of one connector. They fill `pool`, in parts of about `slice_bytes`, and count in `stats`; `copy`
    runs on `thread`."""

    def __init__(
        self,
        pool: Payloads,
        peers: MappedPeers[PeerT],
        copy: CopyBlocks[PeerT],
        thread: RunsFunctions,
        *,
        slice_bytes: int,
        stats: ConnectorStats,
        clock: Clock,
    ) -> None:
        self._pool = pool
        self._peers = peers
        self._copy = copy
        self._thread = thread
        self._slice_bytes = slice_bytes
        self._stats = stats
        self._clock = clock
        self._open = True

    async def fetch(self, source: KVSource | None, blocks: Sequence[NamedBlock], *, timeout: float) -> FetchOutcomes:
        """Implements `KVConnector.fetch`. Raises KVError when this is closed meanwhile."""
        verdicts = Verdicts(len(blocks), timeout=timeout, clock=self._clock)
        await self._fetch(source, blocks, verdicts)
        return verdicts.settle(source, self._stats, block_bytes=self._pool.block_bytes)

    async def close(self) -> None:
        """Unmaps the peers, after the copy under way."""
        self._open = False
        await self._peers.close()

    async def _fetch(self, source: KVSource | None, blocks: Sequence[NamedBlock], verdicts: Verdicts) -> None:
        """Adds the verdicts of the blocks for which there is time."""
        if source is None or not blocks:
            verdicts.found += [FetchOutcome.MISSING] * len(blocks)
            return
        parts = list(slices(blocks, self._pool.block_bytes, self._slice_bytes))
        try:
            holder, found = await self._thread.run(self._find_and_read, source, blocks, parts.pop(0), verdicts)
        finally:
            if self._open:
                self._peers.watch_owners()  # the peer stays mapped, also when the copy fails or the fetch is cancelled
        self._require_open()
        verdicts.found += found
        for part in parts:
            if holder is None or verdicts.seconds_left <= 0:
                break
            self._require_open()
            verdicts.found += await self._thread.run(self._read, holder, part)

    def _require_open(self) -> None:
        if not self._open:
            raise KVError("the connector was closed during a fetch")

    def _find_and_read(
        self, source: KVSource, blocks: Sequence[NamedBlock], first: Sequence[NamedBlock], verdicts: Verdicts
    ) -> tuple[_Holder[PeerT] | None, list[Verdict]]:
        """Returns where the blocks are, with verdicts on the `first` ones if there is time left for them. Without a
        holder the verdicts are on all blocks."""
        peer = self._peers.get(source)
        if isinstance(peer, FetchOutcome | Mismatch):
            return None, [peer] * len(blocks)
        mismatch = peer.segment.mismatch(source, self._pool.geometry)
        if mismatch is not None:
            return None, [mismatch] * len(blocks)
        holder = _Holder(peer, source.epoch, peer.segment.slots.find([block.block_hash for block in blocks]))
        return holder, self._read(holder, first if verdicts.seconds_left > 0 else ())

    def _read(self, holder: _Holder[PeerT], blocks: Sequence[NamedBlock]) -> list[Verdict]:
        """Returns one verdict per block. Several slots may have a name; any good one will do."""
        segment = holder.peer.segment
        if segment.closed:  # the owner died and another fetch noticed first
            return [FetchOutcome.FAILED] * len(blocks)
        verdicts: list[Verdict] = [FetchOutcome.MISSING] * len(blocks)
        for slots in holder.slots:
            untried = [
                index
                for index, block in enumerate(blocks)
                if block.block_hash in slots and verdicts[index] is not FetchOutcome.FETCHED
            ]
            if not untried:
                break
            self._try(holder, blocks, untried, [slots[blocks[index].block_hash] for index in untried], verdicts)
        return verdicts

    def _try(
        self,
        holder: _Holder[PeerT],
        blocks: Sequence[NamedBlock],
        indices: Sequence[int],
        slots: Sequence[int],
        verdicts: list[Verdict],
    ) -> None:
        """Copies the blocks at `indices` from `slots`, where these allow it, and enters what came of it."""
        peer_slots = holder.peer.segment.slots
        tried = [blocks[index] for index in indices]
        snapshots = peer_slots.take_snapshots(slots, tried, epoch=holder.epoch)
        found = snapshots.refusals
        if snapshots.places:  # a copy of nothing would wait for a device all the same
            block_ids = [tried[place].block_id for place in snapshots.places]
            digests = self._copy(holder.peer, block_ids, snapshots.slots)
            found.update(zip(snapshots.places, peer_slots.judge(snapshots, digests), strict=True))
        for place, verdict in found.items():
            if verdict is not FetchOutcome.MISSING:  # what an earlier slot had says more
                verdicts[indices[place]] = verdict
