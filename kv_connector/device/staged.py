"""The connector of a node whose pool is on a device: blocks pass through host memory, which another connector serves.

    publish   device -> slot of the staging -> `inner` publishes the slot and digests the copied bytes; a block whose
              copy is still there is only offered to a store again
    fetch     `inner` fetches into a slot and verifies it there -> device

`inner` keeps every rule of the seam for the staging, whose blocks are the slots; this module knows which slot belongs
to which block. The staging is usually smaller than the pool: a block whose copy gave way to newer ones is MISSING for
peers until it is published again, though the pool still has it.
Invariant: no block of the device is written before `inner` has verified the new content; a slot is used again only when
neither `inner` nor the device touches it any more.
"""

import asyncio
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from kv_connector.base import FetchOutcome, FetchOutcomes, KVConnector, PoolBuffer
from kv_connector.device.memory import BlockCopy, DeviceMemory
from kv_connector.device.staging import ArrivalSlots, StagedBlock, StagedCopies
from kv_connector.stats import ConnectorStats
from kv_connector.worker import Worker
from kvrelay.core.clock import MonotonicClock
from kvrelay.core.errors import ConfigurationError, KVError
from kvrelay.core.kv.block_hash import BlockHash
from kvrelay.core.kv.layout import KVLayout
from kvrelay.core.kv.named_block import NamedBlock
from kvrelay.core.kv.source import KVSource
from kvrelay.core.outages import Outages

_PART_BYTES = 32 << 20  # copied at a time
_ARRIVAL_SHARE = 4  # one slot in so many is for arriving blocks,
_ARRIVAL_BYTES = 512 << 20  # but no more than this in all
_FEWEST_SLOTS = 8
_ARRIVAL, _DEPARTURE = "fetching through the staging", "publishing through the staging"


def staging_blocks(layout: KVLayout, num_blocks: int, staging_bytes: int) -> int:
    """Returns how many blocks the staging of a pool of `num_blocks` gets within `staging_bytes`. Raises
    ConfigurationError when these are too few to work with."""
    all_of_it = num_blocks + num_blocks // (_ARRIVAL_SHARE - 1) + 1
    slots = min(max(all_of_it, _FEWEST_SLOTS), staging_bytes // layout.block_bytes)
    if slots < _FEWEST_SLOTS:
        raise ConfigurationError(
            f"{staging_bytes} bytes of host memory hold {staging_bytes // layout.block_bytes} blocks of "
            f"{layout.block_bytes} bytes, but moving KV in device memory needs {_FEWEST_SLOTS}: raise --kv-staging-gib"
        )
    return slots


class StagedConnector:
    """Implements KVConnector. Owns `inner`, whose pool is `staging`; `memory` is the pool on the device, attached to
    `staging`, with blocks of the same layout. `forgets`: a block may be MISSING for peers while the pool has it."""

    def __init__(self, inner: KVConnector, staging: PoolBuffer, memory: DeviceMemory) -> None:
        assert staging.num_blocks >= 2
        block_bytes = staging.layout.block_bytes
        num_arriving = max(1, min(staging.num_blocks // _ARRIVAL_SHARE, _ARRIVAL_BYTES // block_bytes))
        num_copies = staging.num_blocks - num_arriving
        self.name = inner.name
        self.has_store = inner.has_store
        self.forgets = inner.has_store or num_copies < memory.num_blocks
        self._inner = inner
        self._memory = memory
        self._clock = MonotonicClock()
        self._outages = Outages(self._clock.now)
        self._arrivals = ArrivalSlots(range(num_arriving))
        self._copies = StagedCopies(range(num_arriving, staging.num_blocks), memory.num_blocks)
        # Small enough that there is room for parts of two fetches, and of two publications, at a time.
        part = _PART_BYTES // block_bytes
        self._fetch_part = max(1, min(part, num_arriving // 2))
        self._publish_part = max(1, min(part, num_copies // 2))
        # Of one source (None: the store) as many parts at a time as fit into half of the slots: while it is silent,
        # fetches from others go on.
        self._parts_of_one = max(1, num_arriving // 2 // self._fetch_part)
        self._turns: weakref.WeakValueDictionary[KVSource | None, asyncio.Semaphore] = weakref.WeakValueDictionary()
        self._worker = Worker("kv-staging")
        self._open = True

    def all_stats(self) -> Mapping[str, ConnectorStats]:
        return self._inner.all_stats()

    @property
    def endpoint(self) -> str:
        return self._inner.endpoint

    async def publish(self, blocks: Sequence[NamedBlock]) -> None:
        errors: list[KVError] = []
        num_parts = 0
        for start in range(0, len(blocks), self._publish_part):
            num_parts += 1
            try:
                await self._publish(blocks[start : start + self._publish_part])
            except KVError as error:
                errors.append(error)
        if errors and len(errors) == num_parts:
            raise errors[0]
        for failure in errors:
            self._outages.failed(_DEPARTURE, "some of %d blocks are not published: %s", len(blocks), failure)
        if not errors:
            self._outages.succeeded(_DEPARTURE)

    def retract(self, block_ids: Sequence[int]) -> None:
        self._take_back(self._copies.forget(block_ids))

    async def discard(self, names: Sequence[BlockHash]) -> None:
        await self._inner.discard(names)

    async def finish_storing(self) -> None:
        await self._inner.finish_storing()

    async def fetch(self, source: KVSource | None, blocks: Sequence[NamedBlock], *, timeout: float) -> FetchOutcomes:
        deadline = self._clock.now() + timeout
        outcomes: list[FetchOutcome] = []
        while len(outcomes) < len(blocks):
            self._require_open()
            rest = blocks[len(outcomes) :]
            async with self._slots(source, len(rest), deadline) as slots:
                if not slots:
                    outcomes += [FetchOutcome.FAILED] * len(rest)
                    break
                left = max(0.0, deadline - self._clock.now())
                outcomes += await self._fetch(source, rest[: len(slots)], slots, left)
        return tuple(outcomes)

    async def close(self) -> None:
        if not self._open:
            return
        self._open = False
        try:
            await self._worker.run(self._memory.detach)  # after the copy under way
        finally:
            self._worker.stop()
            await self._inner.close()

    async def _publish(self, blocks: Sequence[NamedBlock]) -> None:
        self._require_open()
        claims = self._copies.claim(blocks, offer_again=self.has_store)
        if claims.given_up:
            self._inner.retract(claims.given_up)
        if claims.copies or claims.existing:
            await self._copy_and_offer(claims.copies, claims.existing)
        if claims.num_refused:
            raise KVError(f"no staging slot for {claims.num_refused} blocks")

    async def _copy_and_offer(self, copies: Sequence[StagedBlock], existing: Sequence[StagedBlock]) -> None:
        """Makes `copies` and publishes them, and publishes `existing` ones again. These stay if that fails, since peers
        may find them still."""
        try:
            if copies:
                await self._worker.run(self._memory.to_host, [copy.copy for copy in copies])
            standing = self._copies.standing([*existing, *copies])
            self._require_open()
            await self._inner.publish([copy.staged for copy in standing])
        except BaseException:
            self._take_back([*(copy.slot for copy in copies), *self._copies.commit(existing)])
            raise
        self._take_back(self._copies.commit([*existing, *copies]))

    def _take_back(self, slots: Sequence[int]) -> None:
        """Frees slots that hold no block any more, in this order: peers must not find one that is used for another."""
        if slots:
            self._inner.retract(slots)
            self._copies.free(slots)

    @asynccontextmanager
    async def _slots(self, source: KVSource | None, num_blocks: int, deadline: float) -> AsyncIterator[Sequence[int]]:
        """Gives slots for a part of `num_blocks` blocks from `source`, at least one; none, and logs that, if there are
        none by `deadline`."""
        turns = self._turns.setdefault(source, asyncio.Semaphore(self._parts_of_one))
        turn = f"{_ARRIVAL} from {'the store' if source is None else source.node_id}"
        slots: Sequence[int] = ()
        async with AsyncExitStack() as stack:
            name, message = turn, f"{turn}: no turn for %d blocks in time, since others wait for it"
            try:
                async with asyncio.timeout(max(0.0, deadline - self._clock.now())):
                    await stack.enter_async_context(turns)
                    self._outages.succeeded(turn)
                    name, message = _ARRIVAL, "no staging slot for %d blocks in time: raise --kv-staging-gib"
                    slots = await self._arrivals.take(min(self._fetch_part, num_blocks))
                    stack.callback(self._arrivals.give_back, slots)
                    self._outages.succeeded(_ARRIVAL)
            except TimeoutError:
                self._outages.failed(name, message, num_blocks)
            yield slots

    async def _fetch(
        self, source: KVSource | None, blocks: Sequence[NamedBlock], slots: Sequence[int], timeout: float
    ) -> Sequence[FetchOutcome]:
        """Fetches through `slots`, which nothing touches any more when this has returned or raised."""
        wanted = [
            NamedBlock(slot, block.block_hash, block.num_tokens) for slot, block in zip(slots, blocks, strict=True)
        ]
        outcomes = await self._inner.fetch(source, wanted, timeout=timeout)
        arrived = [
            BlockCopy(block.block_id, slot)
            for block, slot, outcome in zip(blocks, slots, outcomes, strict=True)
            if outcome is FetchOutcome.FETCHED
        ]
        if arrived:
            self._require_open()
            await self._worker.run(self._memory.from_host, arrived)
        return outcomes

    def _require_open(self) -> None:
        if not self._open:
            raise KVError("the connector is closed")
