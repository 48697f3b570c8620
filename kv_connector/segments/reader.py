"""Fetches from other nodes' segments: blocks are found by name, copied into our pool, and judged by their slots.

The connector decides where the peers' pools are, in the segments or on a device, and how bytes are copied from there.
Invariant: only the connector's thread touches mapped memory, and it is never held for more than two parts of a fetch.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from kv_connector.base import FetchOutcome, FetchOutcomes
from kv_connector.header import Mismatch
from kv_connector.payloads import Payloads
from kv_connector.pool import slices
from kv_connector.segments.mapped_peers import MappedPeers, PeerT
from kv_connector.segments.slots import NO_SLOT
from kv_connector.stats import ConnectorStats
from kv_connector.verdict import Verdict, Verdicts
from kv_connector.worker import RunsFunctions
from kvrelay.core.clock import Clock
from kvrelay.core.errors import KVError
from kvrelay.core.kv.named_block import NamedBlock
from kvrelay.core.kv.source import KVSource
from kvrelay.core.outages import Outages
from kvrelay.core.tasks import end_tasks

CopyBlocks = Callable[[PeerT, Sequence[int], Sequence[int]], Sequence[bytes]]
"""Copies blocks from a peer: (peer, our block ids, the peer's slots). Returns the digests of what arrived."""


@dataclass(frozen=True, slots=True)
class _Wanted(Generic[PeerT]):
    """The blocks of a fetch, the peer that should have them, and the slots where they may be, as `PeerSlots.find`
    returns them."""

    blocks: Sequence[NamedBlock]
    peer: PeerT
    epoch: int
    turns: Sequence[NDArray[np.intp]]


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
        self._outages = Outages(clock.now)
        self._open = True

    async def fetch(self, source: KVSource | None, blocks: Sequence[NamedBlock], *, timeout: float) -> FetchOutcomes:
        """Implements `KVConnector.fetch`. Raises KVError when this is closed meanwhile."""
        verdicts = Verdicts(len(blocks), timeout=timeout, clock=self._clock)
        await self._fetch(source, blocks, verdicts)
        return verdicts.settle(source, self._stats, self._outages, block_bytes=self._pool.block_bytes)

    async def close(self) -> None:
        """Unmaps the peers, after the copy under way."""
        self._open = False
        await self._peers.close()

    async def _fetch(self, source: KVSource | None, blocks: Sequence[NamedBlock], verdicts: Verdicts) -> None:
        """Adds the verdicts, as far as there are any."""
        if source is None or not blocks:
            verdicts.found += [FetchOutcome.MISSING] * len(blocks)
            return
        parts = list(slices(range(len(blocks)), self._pool.block_bytes, self._slice_bytes))
        try:
            wanted, found = await self._thread.run(self._find_and_read, source, blocks, parts.pop(0), verdicts)
        finally:
            if self._open:
                self._peers.watch_owners()  # the peer stays mapped, also when the copy fails or the fetch is cancelled
        self._require_open()
        verdicts.found += found
        if wanted is not None:
            await self._read_parts(wanted, parts, verdicts)

    async def _read_parts(self, wanted: _Wanted[PeerT], parts: Sequence[Sequence[int]], verdicts: Verdicts) -> None:
        """Adds the verdicts of these parts. Each is handed to the thread while it is busy with the one before, so that
        it does not wait for the loop in between."""
        reads: deque[asyncio.Task[list[Verdict]]] = deque()
        try:
            for part in parts:
                self._require_open()
                reads.append(asyncio.create_task(self._thread.run(self._read, wanted, part, verdicts)))
                if len(reads) > 1:
                    verdicts.found += await reads.popleft()
            while reads:
                verdicts.found += await reads.popleft()
        finally:
            await end_tasks(*reads)

    def _require_open(self) -> None:
        if not self._open:
            raise KVError("the connector was closed during a fetch")

    def _find_and_read(
        self, source: KVSource, blocks: Sequence[NamedBlock], first: Sequence[int], verdicts: Verdicts
    ) -> tuple[_Wanted[PeerT] | None, list[Verdict]]:
        """Returns where the blocks may be, with verdicts on the `first` ones; or None, with verdicts on all."""
        peer = self._peers.get(source)
        if isinstance(peer, FetchOutcome | Mismatch):
            return None, [peer] * len(blocks)
        mismatch = peer.segment.mismatch(source, self._pool.geometry)
        if mismatch is not None:
            return None, [mismatch] * len(blocks)
        turns = peer.segment.slots.find([block.block_hash for block in blocks])
        wanted = _Wanted(blocks, peer, source.epoch, turns)
        return wanted, self._read(wanted, first, verdicts)

    def _read(self, wanted: _Wanted[PeerT], part: Sequence[int], verdicts: Verdicts) -> list[Verdict]:
        """Returns one verdict for each block at the places of `part`, which follow each other. Several slots may have a
        name; any good one will do."""
        # A segment is closed when its owner has died and another fetch noticed first.
        if verdicts.seconds_left <= 0 or wanted.peer.segment.closed:
            return [FetchOutcome.FAILED] * len(part)
        found: list[Verdict] = [FetchOutcome.MISSING] * len(part)
        left = np.array(part)  # the blocks that have not arrived
        for turn in wanted.turns:
            left = left[turn[left] != NO_SLOT]
            if not left.size:
                break
            tried = self._try(wanted, [wanted.blocks[index] for index in left.tolist()], turn[left])
            for index, verdict in zip(left.tolist(), tried, strict=True):
                if verdict is not FetchOutcome.MISSING:  # what an earlier slot had says more
                    found[index - part[0]] = verdict
            left = left[[verdict is not FetchOutcome.FETCHED for verdict in tried]]
        return found

    def _try(self, wanted: _Wanted[PeerT], blocks: Sequence[NamedBlock], slots: NDArray[np.intp]) -> Sequence[Verdict]:
        """Copies blocks from slots, one for each, where these allow it. Returns what came of each."""
        peer = wanted.peer
        snapshots = peer.segment.slots.take_snapshots(slots, blocks, epoch=wanted.epoch)
        if not snapshots.places:  # a copy of nothing would wait for a device all the same
            return list(snapshots.refusals.values())
        digests = self._copy(peer, [blocks[place].block_id for place in snapshots.places], snapshots.slots.tolist())
        judged = peer.segment.slots.judge(snapshots, digests)
        if not snapshots.refusals:
            return judged
        found = {**snapshots.refusals, **dict(zip(snapshots.places, judged, strict=True))}
        return [found[place] for place in range(len(blocks))]
