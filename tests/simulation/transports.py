"""How the nodes of a cluster exchange blocks: through the memory of their host, over the network, or through a store.

The tiers and the connector of the store are the real ones. The `in_process` connector stands for those that read the
pool of a peer, under their names. Invariant: over the network nothing comes from a peer that is stopped or cut off, and
over a link that is broken nothing comes either way.
"""

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kv_connector.base import FetchOutcome, FetchOutcomes, HostConnector
from kv_connector.in_process import InProcessConnector, InProcessHub
from kv_connector.tiered import TieredConnector
from kvrelay.core.clock import Clock
from kvrelay.core.kv.named_block import NamedBlock
from kvrelay.core.kv.source import KVSource
from kvrelay.node.prefill_rate import PrefillRate
from tests.kv_connector.faulty import ConnectorFaults, DamagingCopy, FaultyConnector
from tests.simulation.store import Store

SAME_HOST, ANY_HOST, STORE = "shared_memory", "ucx", "redis"


@dataclass(frozen=True, slots=True)
class NodeTransport:
    """What a node exchanges blocks through: `tiers` is its connector, `parts` are what that consists of. Through
    `memory` others read its pool."""

    tiers: TieredConnector[HostConnector]
    parts: tuple[FaultyConnector, ...]
    memory: tuple[InProcessConnector, ...]

    @property
    def num_under_way(self) -> int:
        return sum(part.num_under_way for part in self.parts)

    async def lose_memory(self) -> None:
        """Takes the pool away, because the process has ended without closing it."""
        for connector in reversed(self.memory):  # the first one owns it
            await connector.close()


@dataclass(slots=True)
class Transports:
    """The hosts, the network and the store of a cluster. `is_silent` tells whether the node with an endpoint answers
    no peer now, `is_apart` whether the node at an address does not reach it, though others may."""

    store: Store
    faults: ConnectorFaults
    copy: DamagingCopy
    clock: Clock
    is_silent: Callable[[str], bool]
    is_apart: Callable[[str, str], bool]
    store_ttl: int
    _hubs: dict[str, InProcessHub] = field(default_factory=lambda: defaultdict(InProcessHub))

    def connect(self, names: Sequence[str], host: str, address: str, prefill_rate: PrefillRate) -> NodeTransport:
        """Makes the connector of the node at an address on a host, not allocated yet. `names`: of the tiers, in the
        order of asking."""
        parts: list[FaultyConnector] = []
        memory: list[InProcessConnector] = []
        for name in names:
            if name == STORE:
                parts.append(FaultyConnector(self.store.connector(self.clock, ttl_seconds=self.store_ttl), self.faults))
                continue
            reader = self._reader(name, host, address)
            memory.append(reader)
            parts.append(FaultyConnector(reader, self.faults))
        tiers = TieredConnector(
            parts,
            recompute_seconds=prefill_rate.seconds,
            clock=self.clock,
            host=hashlib.sha256(host.encode()).hexdigest()[:16],
        )
        return NodeTransport(tiers, tuple(parts), tuple(memory))

    def _reader(self, name: str, host: str, address: str) -> InProcessConnector:
        is_apart = partial(self.is_apart, address)
        if name == SAME_HOST:  # containers may have a /dev/shm each
            reader = _Reader(self._hubs[host], is_apart, self.clock, self.copy, waits=False)
        else:
            reader = _Reader(
                self._hubs[ANY_HOST],
                lambda endpoint: self.is_silent(endpoint) or is_apart(endpoint),
                self.clock,
                self.copy,
                waits=True,
            )
        reader.name = name
        return reader


class _Reader(InProcessConnector):
    """A connector that reads the pools that it reaches. It `waits` in vain for what it does not reach, as over a
    network, or knows at once that it is not there."""

    def __init__(
        self,
        hub: InProcessHub,
        is_out_of_reach: Callable[[str], bool],
        clock: Clock,
        copy: DamagingCopy,
        *,
        waits: bool,
    ) -> None:
        super().__init__(hub, clock=clock, copy=copy)
        self._is_out_of_reach = is_out_of_reach
        self._waits = waits

    async def fetch(self, source: KVSource | None, blocks: Sequence[NamedBlock], *, timeout: float) -> FetchOutcomes:
        if source is not None and self._is_out_of_reach(source.endpoint):
            if self._waits:
                await asyncio.sleep(timeout)
            return (FetchOutcome.FAILED,) * len(blocks)
        return await super().fetch(source, blocks, timeout=timeout)
