"""A whole cluster in one virtual process tree: the real router core, services, nodes, engines and connectors; digests
in the place of a model; a simulated network.

Nodes can be killed, started again, stopped (SIGSTOP) and drained. Invariant: a killed process does nothing more, not
even its clean-up. The others see of it what they would see of a dead process.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, TypeVar, cast

import grpc
from prometheus_client import CollectorRegistry

from decode_node.service import DecodeService
from kv_connector.faulty import DamagingCopy, FaultyConnector
from kv_connector.in_process import InProcessConnector, InProcessHub
from kvrelay.core.block_hash import KVNamespace
from kvrelay.core.kv_layout import KVLayout
from kvrelay.engine.engine import Engine
from kvrelay.engine.scheduler import SchedulerConfig
from kvrelay.node.node import Node, NodeIdentity
from kvrelay.node.node_service import NodeService
from kvrelay.v1 import node_pb2_grpc
from prefill_node.service import PrefillService
from router.nodes.kv_index import KVIndex
from router.nodes.registry import Registry
from router.policy import make_policy
from router.relay.limits import RelayLimits
from router.relay.recovery_metrics import RecoveryMetrics
from router.relay.relay import ClusterRelay
from tests.engine.late_runner import LateRunner, WatchedPool
from tests.simulation.engine import DigestRunner, VirtualEngineThread
from tests.simulation.faults import Faults
from tests.simulation.network import Network
from tests.simulation.oracle import EOS_TOKEN_ID, SLOT_BYTES, VOCAB_SIZE
from tests.simulation.rpc import Channel, Server
from tests.simulation.virtual_loop import Process, VirtualLoop

T = TypeVar("T")

BLOCK_SIZE = 4
LAYOUT = KVLayout(num_kv_heads=1, num_layers=1, block_size=BLOCK_SIZE, head_dim=SLOT_BYTES // 8, dtype="float32")
_MAX_CONCURRENT_REQUESTS = 1024  # more than any scenario has
NAMESPACE = KVNamespace(b"simulated", LAYOUT.dtype, LAYOUT.layout_id, BLOCK_SIZE)


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """The size and the settings of a cluster. `damage`: probability that a copied payload loses a bit. `run_ahead`:
    engines plan the next step while the device has not begun the one before. Times are in seconds."""

    num_prefill_nodes: int = 2
    num_decode_nodes: int = 2
    num_blocks: int = 64
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 16
    policy: str = "prefix_aware"
    local_prefill_max_tokens: int = 0
    max_attempts: int = 10
    node_wait: float = 120.0
    lease_ttl: float = 6.0
    node_timeout: float = 2.0
    node_silence: float = 5.0
    fetch_timeout: float = 3.0
    longest_step: float = 0.02
    stream_interval: float = 0.01
    damage: float = 0.0
    run_ahead: bool = False

    @property
    def prefill_addresses(self) -> list[str]:
        return [f"prefill-{index}" for index in range(self.num_prefill_nodes)]

    @property
    def decode_addresses(self) -> list[str]:
        return [f"decode-{index}" for index in range(self.num_decode_nodes)]

    @property
    def max_model_len(self) -> int:
        return min(128, self.num_blocks * BLOCK_SIZE)


class VirtualClock:
    def now(self) -> float:
        return asyncio.get_running_loop().time()


@dataclass(slots=True)
class RunningNode:
    """One life of a node: a process, and everything that runs in it."""

    address: str
    process: Process
    node: Node
    service: PrefillService | DecodeService
    server: Server
    connector: FaultyConnector

    @property
    def name(self) -> str:
        return self.node.identity.node_id


@dataclass(slots=True)
class Router:
    process: Process
    registry: Registry
    relay: ClusterRelay


@dataclass(slots=True)
class Cluster:
    """A running cluster. `nodes` are those that live, by address. `failures` are errors of the code under test,
    whatever else happens."""

    loop: VirtualLoop
    config: ClusterConfig
    random: Random
    faults: Faults
    trace: Callable[[str], None]
    failures: list[str] = field(default_factory=list)
    nodes: dict[str, RunningNode] = field(default_factory=dict)
    dead: list[Process] = field(default_factory=list)
    network: Network = field(init=False)
    copy: DamagingCopy = field(init=False)
    _hub: InProcessHub = field(default_factory=InProcessHub)
    _servers: dict[str, Server] = field(default_factory=dict)
    _num_starts: int = 0
    _router: Router | None = None

    def __post_init__(self) -> None:
        self.network = Network(self.faults, self.trace)
        self.copy = DamagingCopy(Random(self.random.getrandbits(64)), probability=self.config.damage)

    # -- life ----------------------------------------------------------------------------------------------------------

    @property
    def router(self) -> Router:
        assert self._router is not None
        return self._router

    async def start(self) -> None:
        for address in (*self.config.prefill_addresses, *self.config.decode_addresses):
            self.start_node(address)
        self.start_router()
        await process_task(self.router.process, self.router.registry.wait_settled(30.0))

    def start_router(self) -> None:
        process = Process("router")
        self._router = process.run(self._make_router, process)

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
        await running.connector.close()  # the system takes its memory away
        self.network.died(running.process)

    def kill_router(self) -> None:
        self.trace("the router is killed")
        self.router.process.kill()
        self.dead.append(self.router.process)
        self.network.died(self.router.process)
        self.start_router()

    def pause(self, process: Process, seconds: float) -> None:
        if process.is_paused or process.is_dead:
            return
        self.trace(f"{process.name} is stopped for {seconds:.3f} s")
        process.pause()
        self.network.paused(process)
        self.loop.call_later(seconds, self._resume, process, context=self.network.context)

    async def stop_node(self, address: str, *, drain_seconds: float) -> None:
        """Stops a node as `NodeServer` does on SIGTERM."""
        running = self.nodes.pop(address)
        self.trace(f"{address} drains")
        await process_task(running.process, self._stop_node(running, drain_seconds))
        self.trace(f"{address} has ended")

    async def close(self) -> None:
        """Ends everything in an orderly way."""
        router = self.router
        await process_task(router.process, router.relay.close(timeout=5.0))
        await process_task(router.process, router.registry.close())
        for running in list(self.nodes.values()):
            await process_task(running.process, self._stop_node(running, 1.0))

    # -- making --------------------------------------------------------------------------------------------------------

    def _make_router(self, process: Process) -> Router:
        config = self.config
        registry = Registry(
            config.prefill_addresses,
            config.decode_addresses,
            KVIndex(capacity=10_000),
            timeout=config.node_timeout,
            silence=config.node_silence,
            clock=VirtualClock(),
            connect=lambda address: cast("grpc.aio.Channel", Channel(self.network, self._servers, process, address)),
            random=Random(self.random.getrandbits(64)),
        )
        registry.start()
        limits = RelayLimits(
            max_concurrent_requests=_MAX_CONCURRENT_REQUESTS,
            max_attempts=config.max_attempts,
            node_wait=config.node_wait,
            lease_ttl=config.lease_ttl,
            node_timeout=config.node_timeout,
        )
        relay = ClusterRelay(
            registry,
            make_policy(config.policy, local_prefill_max_tokens=config.local_prefill_max_tokens),
            limits,
            RecoveryMetrics("simulated", CollectorRegistry()),
            clock=VirtualClock(),
            random=Random(self.random.getrandbits(64)),
        )
        return Router(process, registry, relay)

    def _max_model_len(self, address: str) -> int:
        """Returns the length that a node starts with. Those that come back may take only half, except the first of
        their kind, so that whatever has begun can end."""
        is_start = self._num_starts <= len(self.config.prefill_addresses) + len(self.config.decode_addresses)
        if is_start or address.endswith("-0") or self.random.random() < 0.7:
            return self.config.max_model_len
        return self.config.max_model_len // 2

    def _make_node(self, address: str, process: Process) -> RunningNode:
        self._num_starts += 1
        epoch = self.random.getrandbits(62) << 1 | 1
        node_id = address if self.random.random() < 0.5 else f"{address}.{self._num_starts}"
        inner = InProcessConnector(self._hub, clock=VirtualClock(), copy=self.copy)
        connector = FaultyConnector(inner, self.faults)
        buffer = connector.allocate(LAYOUT, self.config.num_blocks, node_id=node_id, epoch=epoch)
        config = SchedulerConfig(
            BLOCK_SIZE,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_model_len=self._max_model_len(address),
        )
        runner = DigestRunner(buffer.memory, BLOCK_SIZE)
        late = LateRunner(runner)
        engine = Engine(
            config,
            late if self.config.run_ahead else runner,
            WatchedPool(self.config.num_blocks, late, on_evict=connector.retract),
            NAMESPACE,
            eos_token_ids=(EOS_TOKEN_ID,),
            publish=True,
            run_ahead=self.config.run_ahead,
            clock=VirtualClock(),
        )
        node = Node(
            NodeIdentity(node_id, epoch, "simulated", NAMESPACE, LAYOUT.block_bytes, VOCAB_SIZE),
            engine,
            connector,
            fetch_timeout=self.config.fetch_timeout,
            make_engine_thread=partial(
                VirtualEngineThread,
                context=process.context,
                step_seconds=lambda: self.random.uniform(0.002, self.config.longest_step),
                on_failure=lambda error: self.failures.append(f"the engine of {address} crashed: {error!r}"),
                stream_interval=self.config.stream_interval,
            ),
        )
        service: PrefillService | DecodeService
        is_prefill = address in self.config.prefill_addresses
        service = PrefillService(node, clock=VirtualClock()) if is_prefill else DecodeService(node)
        server = Server(process, self.network)
        service.attach(cast("grpc.aio.Server", server))
        node_pb2_grpc.add_NodeServicer_to_server(
            NodeService(node, service.role, clock=VirtualClock()), cast("grpc.aio.Server", server)
        )
        service.start()
        return RunningNode(address, process, node, service, server, connector)

    # -- ending --------------------------------------------------------------------------------------------------------

    def _resume(self, process: Process) -> None:
        if not process.is_dead:
            self.trace(f"{process.name} continues")
            process.resume()

    async def _stop_node(self, running: RunningNode, drain_seconds: float) -> None:
        try:
            async with asyncio.timeout(drain_seconds):
                await running.node.drain()
        except TimeoutError:
            self.trace(f"{running.address} is cut short")
        self._servers.pop(running.address, None)
        running.node.event_log.close()
        await running.service.close()
        await running.server.stop()
        await running.node.close()


def process_task(process: Process, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
    """Runs `work` as a task of the process."""
    return asyncio.get_running_loop().create_task(work, context=process.context)
