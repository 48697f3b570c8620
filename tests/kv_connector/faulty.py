"""A connector for tests that wraps another: its calls fail before or after they took effect, wait, stall, or bring
garbage.

Invariant: it breaks no promise of the seam (`base.py`), and a block that it reports as fetched is the block that the
wrapped connector has verified.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import Protocol

from kv_connector.base import FetchOutcome, FetchOutcomes, HostConnector, PoolBuffer
from kv_connector.header import Mismatch, payload_digest
from kv_connector.pool import Rows, copy_payload
from kv_connector.stats import ConnectorStats
from kvrelay.core.errors import KVError
from kvrelay.core.kv.block_hash import BlockHash
from kvrelay.core.kv.layout import KVLayout
from kvrelay.core.kv.named_block import NamedBlock
from kvrelay.core.kv.source import KVSource

_STALL_SECONDS = 5.0  # of a publish, which has no deadline of its own


class ConnectorFault(Enum):
    """What goes wrong with one call."""

    FAIL = "fail"  # KVError, and nothing was done
    LOSE = "lose"  # KVError although it is done
    STALL = "stall"  # nothing until the deadline; then a fetch reports FAILED and a publish raises KVError
    DAMAGE = "damage"  # fetches only: garbage arrives, reported as REFUSED


@dataclass(frozen=True, slots=True)
class CallPlan:
    """What happens to one call, after `delay` seconds."""

    fault: ConnectorFault | None = None
    delay: float = 0.0


class ConnectorFaults(Protocol):
    """The source of the faults of a `FaultyConnector`."""

    def plan(self, method: str) -> CallPlan:
        """Returns the plan for the next call of `method`, "publish" or "fetch"."""
        ...


class SeededFaults:
    """Faults drawn from `random`: each call fails with `probability` and waits up to `longest_delay` seconds."""

    def __init__(self, random: Random, *, probability: float, longest_delay: float) -> None:
        self._random = random
        self._probability = probability
        self._longest_delay = longest_delay

    def plan(self, method: str) -> CallPlan:
        faults = [fault for fault in ConnectorFault if method == "fetch" or fault is not ConnectorFault.DAMAGE]
        fault = self._random.choice(faults) if self._random.random() < self._probability else None
        return CallPlan(fault, self._random.uniform(0.0, self._longest_delay))


class FaultyConnector:
    """Implements HostConnector around `inner`. `num_under_way`: calls that have not returned."""

    def __init__(self, inner: HostConnector, faults: ConnectorFaults) -> None:
        self.name = inner.name  # peers exchange blocks between connectors of one name
        self.has_store = inner.has_store
        self.num_under_way = 0
        self._inner = inner
        self._faults = faults
        self._buffer: PoolBuffer | None = None

    def all_stats(self) -> Mapping[str, ConnectorStats]:
        return self._inner.all_stats()

    def allocate(
        self, layout: KVLayout, num_blocks: int, *, node_id: str, epoch: int, buffer: PoolBuffer | None = None
    ) -> PoolBuffer:
        self._buffer = self._inner.allocate(layout, num_blocks, node_id=node_id, epoch=epoch, buffer=buffer)
        return self._buffer

    @property
    def endpoint(self) -> str:
        return self._inner.endpoint

    async def publish(self, blocks: Sequence[NamedBlock]) -> None:
        with self._under_way():
            plan = self._faults.plan("publish")
            await asyncio.sleep(plan.delay)
            match plan.fault:
                case ConnectorFault.FAIL:
                    raise KVError("injected: nothing was published")
                case ConnectorFault.STALL:
                    await asyncio.sleep(_STALL_SECONDS)
                    raise KVError("injected: publishing took too long")
            await self._inner.publish(blocks)
            if plan.fault is ConnectorFault.LOSE:
                raise KVError("injected: published, but nobody said so")

    def retract(self, block_ids: Sequence[int]) -> None:
        self._inner.retract(block_ids)

    async def discard(self, names: Sequence[BlockHash]) -> None:
        await self._inner.discard(names)

    async def finish_storing(self) -> None:
        await self._inner.finish_storing()

    async def fetch(self, source: KVSource | None, blocks: Sequence[NamedBlock], *, timeout: float) -> FetchOutcomes:
        with self._under_way():
            plan = self._faults.plan("fetch")
            delay = min(plan.delay, timeout)
            await asyncio.sleep(delay)
            match plan.fault:
                case ConnectorFault.FAIL:
                    raise KVError("injected: nothing was fetched")
                case ConnectorFault.STALL:
                    await asyncio.sleep(timeout - delay)
                    return (FetchOutcome.FAILED,) * len(blocks)
            outcomes = await self._inner.fetch(source, blocks, timeout=timeout - delay)
            match plan.fault:
                case ConnectorFault.LOSE:
                    raise KVError("injected: fetched, but nobody said so")
                case ConnectorFault.DAMAGE:
                    return self._damage(blocks, outcomes)
            return outcomes

    async def close(self) -> None:
        await self._inner.close()

    def _damage(self, blocks: Sequence[NamedBlock], outcomes: FetchOutcomes) -> FetchOutcomes:
        """Overwrites the later half of what arrived: the content of a block that is not FETCHED is undefined."""
        assert self._buffer is not None
        block_bytes = self._buffer.layout.block_bytes
        damaged = list(outcomes)
        for index in range(len(blocks) // 2, len(blocks)):
            if outcomes[index] is FetchOutcome.FETCHED:
                start = blocks[index].block_id * block_bytes
                self._buffer.memory[start : start + block_bytes] = b"\xa5" * block_bytes
                damaged[index] = FetchOutcome.REFUSED
                self.all_stats()[self.name].refused[Mismatch.DIGEST] += 1
        return tuple(damaged)

    @contextmanager
    def _under_way(self) -> Iterator[None]:
        self.num_under_way += 1
        try:
            yield
        finally:
            self.num_under_way -= 1


class DamagingCopy:
    """A `CopyPayload` that flips a bit of some payloads, for the digest to find. `num_damaged` counts them."""

    def __init__(self, random: Random, *, probability: float) -> None:
        self.num_damaged = 0
        self.probability = probability
        self._random = random

    def __call__(self, destination: Rows, source: Rows) -> bytes:
        digest = copy_payload(destination, source)
        if self._random.random() >= self.probability:
            return digest
        self.num_damaged += 1
        destination[self._random.randrange(destination.size)] ^= 1 << self._random.randrange(8)
        return payload_digest(destination.data)
