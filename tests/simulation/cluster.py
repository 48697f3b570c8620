"""A whole cluster in one virtual process tree: the real router core, services, nodes, engines and connectors; digests
in the place of a model; a simulated network.

Nodes can be killed, started again, stopped (SIGSTOP) and drained. Invariant: a killed process does nothing more, not
even its clean-up. The others see of it what they would see of a dead process.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, TypeVar, cast

import grpc
from prometheus_client import CollectorRegistry

from kvrelay.core.tasks import first_of
from router.nodes.kv_index import KVIndex
from router.nodes.registry import Registry
from router.policies.choice import make_policy
from router.relay.limits import RelayLimits
from router.relay.placer import Placer
from router.relay.recovery_metrics import RecoveryMetrics
from router.relay.relay import ClusterRelay
from tests.kv_connector.faulty import DamagingCopy
from tests.simulation.faults import Faults
from tests.simulation.network import Network
from tests.simulation.node_config import NodeConfig, draw_node_config
from tests.simulation.rpc import Channel, Server
from tests.simulation.running_node import NodeMaker, RunningNode
from tests.simulation.store import Store
from tests.simulation.transports import SAME_HOST, Transports
from tests.simulation.virtual_loop import Process, VirtualClock, VirtualLoop

T = TypeVar("T")
_DRAIN_SECONDS = 30.0  # of an idle node; the store may still owe it an answer


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """The size and the settings of a cluster. `node`: the settings that nodes usually have; with the probability
    `variety` one has others, every time it starts. `lease_ttls`: one for each router. `connectors`: the tiers of a node
    in the order of asking; nodes are on `num_hosts` hosts in turn, and with `lends_cores` say that those of a host lend
    each other cores. `damage`: probability that a payload loses a bit when it is copied or read from the store. Times
    are in seconds."""

    num_prefill_nodes: int = 2
    num_decode_nodes: int = 2
    node: NodeConfig = field(default_factory=NodeConfig)
    variety: float = 0.0
    policy: str = "prefix_aware"
    local_prefill_max_tokens: int = 0
    kv_index_capacity: int = 10_000
    max_concurrent_requests: int = 1024
    max_node_losses: int = 10
    node_wait: float = 120.0
    lease_ttls: tuple[float, ...] = (6.0,)
    node_timeout: float = 2.0
    node_silence: float = 5.0
    longest_step: float = 0.02
    connectors: tuple[str, ...] = (SAME_HOST,)
    num_hosts: int = 1
    lends_cores: bool = False
    store_ttl: int = 3600
    damage: float = 0.0

    @property
    def prefill_addresses(self) -> list[str]:
        return [f"prefill-{index}" for index in range(self.num_prefill_nodes)]

    @property
    def decode_addresses(self) -> list[str]:
        return [f"decode-{index}" for index in range(self.num_decode_nodes)]

    @property
    def router_names(self) -> list[str]:
        return [f"router-{index}" for index in range(len(self.lease_ttls))]


@dataclass(slots=True)
class Router:
    process: Process
    registry: Registry
    relay: ClusterRelay


@dataclass(slots=True)
class Cluster:
    """A running cluster. `nodes` are those that live, by address; `routers` by name. `failures` are errors of the code
    under test, whatever else happens."""

    loop: VirtualLoop
    config: ClusterConfig
    random: Random
    faults: Faults
    trace: Callable[[str], None]
    failures: list[str] = field(default_factory=list)
    nodes: dict[str, RunningNode] = field(default_factory=dict)
    routers: dict[str, Router] = field(default_factory=dict)
    dead: list[Process] = field(default_factory=list)
    network: Network = field(init=False)
    copy: DamagingCopy = field(init=False)
    store: Store = field(init=False)
    _transports: Transports = field(init=False)
    _maker: NodeMaker = field(init=False)
    _servers: dict[str, Server] = field(default_factory=dict)
    _broken_links: Counter[frozenset[str]] = field(default_factory=Counter)
    _num_starts: int = 0

    def __post_init__(self) -> None:
        self.network = Network(self.faults, self.trace)
        self.copy = DamagingCopy(Random(self.random.getrandbits(64)), probability=self.config.damage)
        self.store = Store(Random(self.random.getrandbits(64)), self.faults.delay, damage=self.config.damage)
        self._transports = Transports(
            self.store, self.faults, self.copy, VirtualClock(), self._is_silent, self._is_apart, self.config.store_ttl
        )
        self._maker = NodeMaker(self.network, self.faults, self.random, self.config.longest_step, self._engine_crashed)

    # -- life ----------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        for address in (*self.config.prefill_addresses, *self.config.decode_addresses):
            self.start_node(address)
        for name in self.config.router_names:
            self.start_router(name)
        for router in self.routers.values():
            await process_task(router.process, first_of(router.registry.wait_settled(), asyncio.sleep(30.0)))

    def start_router(self, name: str) -> None:
        process = Process(name)
        lease_ttl = self.config.lease_ttls[self.config.router_names.index(name)]
        self.routers[name] = process.run(self._make_router, process, lease_ttl)

    def start_node(self, address: str) -> None:
        """Starts a node again at the same address, with a new epoch."""
        assert address not in self.nodes
        process = Process(address)
        running = self.nodes[address] = process.run(self._make_node, address, process)
        self._servers[address] = running.server
        self.trace(f"{address} starts with epoch {running.node.identity.epoch:x}")

    async def kill(self, address: str) -> None:
        running = self.nodes.pop(address)
        self.trace(f"{address} is killed")
        del self._servers[address]
        running.process.kill()
        self.dead.append(running.process)
        await running.transport.lose_memory()
        self.network.died(running.process)

    def kill_router(self, name: str) -> None:
        router = self.routers[name]
        self.trace(f"{name} is killed")
        router.process.kill()
        self.dead.append(router.process)
        self.network.died(router.process)
        self.start_router(name)

    def pause(self, process: Process, seconds: float) -> None:
        if process.is_paused or process.is_dead:
            return
        self.trace(f"{process.name} is stopped for {seconds:.3f} s")
        process.pause()
        self.network.paused(process)
        self.loop.call_later(seconds, self._resume, process, context=self.network.context)

    def break_link(self, ends: tuple[str, str], seconds: float) -> None:
        """Lets two nodes not read each other's pools for a while. Everything else goes on."""
        self.trace(f"{' and '.join(ends)} do not reach each other for {seconds} s")
        link = frozenset(ends)
        self._broken_links[link] += 1
        self.loop.call_later(seconds, self._broken_links.subtract, [link], context=self.network.context)

    async def stop_node(self, address: str, *, drain_seconds: float) -> None:
        """Stops a node as `NodeServer` does on SIGTERM."""
        running = self.nodes.pop(address)
        self.trace(f"{address} drains")
        await process_task(running.process, self._stop_node(running, drain_seconds))
        self.trace(f"{address} has ended")

    def calm_down(self) -> None:
        """Lets nothing go wrong any more."""
        self.faults.stop()
        self.copy.probability = self.store.damage = 0.0

    async def close(self) -> None:
        """Ends everything in an orderly way. The nodes are idle, so their drains have to end."""
        for router in self.routers.values():
            await process_task(router.process, router.relay.close(timeout=5.0))
            await process_task(router.process, router.registry.close())
        for running in list(self.nodes.values()):
            if not await process_task(running.process, self._stop_node(running, _DRAIN_SECONDS)):
                self.failures.append(f"{running.address} is idle and does not end its drain")

    # -- making --------------------------------------------------------------------------------------------------------

    def _make_router(self, process: Process, lease_ttl: float) -> Router:
        config = self.config
        registry = Registry(
            config.prefill_addresses,
            config.decode_addresses,
            KVIndex(config.kv_index_capacity),
            timeout=config.node_timeout,
            silence=config.node_silence,
            clock=VirtualClock(),
            connect=lambda address: cast("grpc.aio.Channel", Channel(self.network, self._servers, process, address)),
            random=Random(self.random.getrandbits(64)),
        )
        registry.start()
        limits = RelayLimits(
            max_concurrent_requests=config.max_concurrent_requests,
            max_node_losses=config.max_node_losses,
            node_wait=config.node_wait,
            lease_ttl=lease_ttl,
            node_timeout=config.node_timeout,
        )
        policy = make_policy(config.policy, local_prefill_max_tokens=config.local_prefill_max_tokens)
        relay = ClusterRelay(
            registry,
            Placer(registry, policy, limits),
            limits,
            RecoveryMetrics("simulated", CollectorRegistry()),
            clock=VirtualClock(),
            random=Random(self.random.getrandbits(64)),
        )
        return Router(process, registry, relay)

    def _make_node(self, address: str, process: Process) -> RunningNode:
        self._num_starts += 1
        role, _, number = address.partition("-")
        config, connectors = self.config.node, self.config.connectors
        if self.random.random() < self.config.variety:
            # The first of its kind takes whatever the others do, so that whatever has begun can end.
            config = draw_node_config(self.random, config, serves_all=number == "0")
            connectors = connectors[self.random.randrange(len(connectors)) :]  # all have the last one
        host = f"host-{int(number) % self.config.num_hosts}"
        return self._maker.make(
            config,
            address,
            process,
            partial(self._transports.connect, connectors, host, address),
            core_table=host if self.config.lends_cores else "",
            node_id=address if self.random.random() < 0.5 else f"{address}.{self._num_starts}",
            is_prefill=role == "prefill",
        )

    def _engine_crashed(self, address: str, error: BaseException) -> None:
        self.failures.append(f"the engine of {address} crashed: {error!r}")

    def _is_silent(self, endpoint: str) -> bool:
        """Tells whether the node with this endpoint is stopped or cut off, and answers no peer."""
        return any(
            running.process.is_paused or self.network.is_cut_off(running.address)
            for running in self._nodes_with(endpoint)
        )

    def _is_apart(self, address: str, endpoint: str) -> bool:
        """Tells whether the node at an address does not reach the one with this endpoint."""
        return any(
            self._broken_links[frozenset((address, running.address))] > 0 for running in self._nodes_with(endpoint)
        )

    def _nodes_with(self, endpoint: str) -> Iterator[RunningNode]:
        for running in self.nodes.values():
            if endpoint in (connector.endpoint for connector in running.transport.memory):
                yield running

    # -- ending --------------------------------------------------------------------------------------------------------

    def _resume(self, process: Process) -> None:
        if not process.is_dead:
            self.trace(f"{process.name} continues")
            process.resume()

    async def _stop_node(self, running: RunningNode, drain_seconds: float) -> bool:
        """Returns whether the node has drained in time."""
        try:
            async with asyncio.timeout(drain_seconds) as limit:
                await running.node.drain()
        except TimeoutError:
            self.trace(f"{running.address} is cut short")
        self._servers.pop(running.address, None)
        running.node.event_log.close()
        await running.service.close()
        await running.server.stop()
        await running.node.close()
        return not limit.expired()


def process_task(process: Process, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
    """Runs `work` as a task of the process."""
    return asyncio.get_running_loop().create_task(work, context=process.context)
