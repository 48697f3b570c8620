"""One life of a node: a process with the real service, engine and connector, and digests in the place of a model."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import cast

import grpc

from decode_node.service import DecodeService
from kvrelay.core.kv.block_hash import KVNamespace
from kvrelay.core.kv.layout import KVLayout
from kvrelay.engine.engine import Engine
from kvrelay.engine.scheduler import SchedulerConfig
from kvrelay.node.node import Node, NodeIdentity
from kvrelay.node.node_service import NodeService
from kvrelay.node.prefill_rate import PrefillRate
from kvrelay.v1 import node_pb2_grpc
from prefill_node.service import PrefillService
from tests.engine.late_runner import LateRunner, WatchedPool
from tests.simulation.engine import DigestRunner, FailingRunner, VirtualEngineThread
from tests.simulation.faults import Faults
from tests.simulation.network import Network
from tests.simulation.node_config import BLOCK_SIZE, NodeConfig
from tests.simulation.oracle import EOS_TOKEN_ID, SLOT_BYTES, VOCAB_SIZE
from tests.simulation.rpc import Server
from tests.simulation.transports import NodeTransport
from tests.simulation.virtual_loop import Process, VirtualClock

LAYOUT = KVLayout(num_kv_heads=1, num_layers=1, block_size=BLOCK_SIZE, head_dim=SLOT_BYTES // 8, dtype="float32")
NAMESPACE = KVNamespace(b"simulated", LAYOUT.dtype, LAYOUT.layout_id, BLOCK_SIZE)


@dataclass(slots=True)
class RunningNode:
    """A process, and everything that runs in it."""

    address: str
    process: Process
    node: Node
    engine: Engine
    service: PrefillService | DecodeService
    server: Server
    transport: NodeTransport
    memory: memoryview  # its pool

    @property
    def name(self) -> str:
        return self.node.identity.node_id


@dataclass(frozen=True, slots=True)
class NodeMaker:
    """What the nodes of a cluster have in common. `on_failure` is called with the address and the crash of an engine;
    steps take at most `longest_step` seconds."""

    network: Network
    faults: Faults
    random: Random
    longest_step: float
    on_failure: Callable[[str, BaseException], None]

    def make(
        self,
        config: NodeConfig,
        address: str,
        process: Process,
        connect: Callable[[PrefillRate], NodeTransport],
        *,
        core_table: str,
        node_id: str,
        is_prefill: bool,
    ) -> RunningNode:
        """Starts a node in its process."""
        epoch = self.random.getrandbits(62) << 1 | 1
        prefill_rate = PrefillRate()
        transport = connect(prefill_rate)
        connector = transport.tiers
        buffer = connector.allocate(LAYOUT, config.num_blocks, node_id=node_id, epoch=epoch)
        engine = _make_engine(config, transport, buffer.memory, self.faults)
        node = Node(
            NodeIdentity(node_id, epoch, NAMESPACE, VOCAB_SIZE, (EOS_TOKEN_ID,)),
            engine,
            connector,
            fetch_timeout=config.fetch_timeout,
            prefill_rate=prefill_rate,
            make_engine_thread=partial(
                VirtualEngineThread,
                context=process.context,
                step_seconds=lambda: self.random.uniform(0.002, self.longest_step),
                on_failure=partial(self.on_failure, address),
                stream_interval=config.stream_interval,
            ),
        )
        node.core_table = core_table
        service: PrefillService | DecodeService
        service = PrefillService(node, clock=VirtualClock()) if is_prefill else DecodeService(node)
        server = Server(process, self.network)
        service.attach(cast("grpc.aio.Server", server))
        node_pb2_grpc.add_NodeServicer_to_server(
            NodeService(node, service.role, clock=VirtualClock()), cast("grpc.aio.Server", server)
        )
        service.start()
        return RunningNode(address, process, node, engine, service, server, transport, buffer.memory)


def _make_engine(config: NodeConfig, transport: NodeTransport, memory: memoryview, faults: Faults) -> Engine:
    runner = DigestRunner(memory, BLOCK_SIZE, samples_later=config.samples_later)
    late = LateRunner(runner)
    return Engine(
        SchedulerConfig(
            BLOCK_SIZE,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_mixed_tokens=config.max_num_mixed_tokens,
            max_model_len=config.longest,
            policy=config.policy,
        ),
        FailingRunner(late if config.run_ahead else runner, faults.step_fails, run_ahead=config.run_ahead),
        WatchedPool(config.num_blocks, late, retract=transport.tiers.retract),
        NAMESPACE,
        eos_token_ids=(EOS_TOKEN_ID,),
        publish=True,
        publish_hits=transport.tiers.has_store,
        run_ahead=config.run_ahead,
        clock=VirtualClock(),
    )
