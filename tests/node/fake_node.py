"""A node without a model: a real engine thread over the fake runner, joined with the in-process connector."""

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from decode_node.service import DecodeService
from kv_connector.base import FetchOutcomes, HostConnector
from kv_connector.in_process import InProcessConnector, InProcessHub
from kvrelay.core.errors import KVRelayError
from kvrelay.core.kv.block_hash import KVNamespace
from kvrelay.core.kv.layout import KVLayout
from kvrelay.core.kv.named_block import NamedBlock
from kvrelay.core.kv.source import KVSource
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.engine import Engine
from kvrelay.engine.plan import SchedulerOutput
from kvrelay.engine.runner import LaunchedStep, Runner
from kvrelay.engine.scheduler import SchedulerConfig
from kvrelay.node.node import Node, NodeIdentity
from kvrelay.node.prefill_rate import PrefillRate
from prefill_node.service import PrefillService
from tests.engine.fake_runner import VOCAB_SIZE, FakeRunner

ServiceT = TypeVar("ServiceT", PrefillService, DecodeService)

BLOCK_SIZE = 8
NUM_BLOCKS = 64
EPOCH = 1
LAYOUT = KVLayout(num_kv_heads=1, num_layers=1, block_size=BLOCK_SIZE, head_dim=8, dtype="float32")


class BrokenConnector(InProcessConnector):
    """A connector whose fetches raise an unforeseen error."""

    async def fetch(self, source: KVSource | None, blocks: Sequence[NamedBlock], *, timeout: float) -> FetchOutcomes:
        raise RuntimeError("no such case")


class FailingRunner(FakeRunner):
    """A runner that can carry out no step."""

    def __init__(self) -> None:
        super().__init__(NUM_BLOCKS, BLOCK_SIZE)

    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        raise KVRelayError("the logits are not finite")


class GatedRunner(FakeRunner):
    """A runner whose steps wait until `gate` is open."""

    def __init__(self) -> None:
        super().__init__(NUM_BLOCKS, BLOCK_SIZE)
        self.gate = threading.Event()

    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        assert self.gate.wait(timeout=10.0)
        return super().launch(plan)


class StepwiseRunner(FakeRunner):
    """A runner that may launch as many steps as `steps` was released for."""

    def __init__(self) -> None:
        super().__init__(NUM_BLOCKS, BLOCK_SIZE)
        self.steps = threading.Semaphore(0)

    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        assert self.steps.acquire(timeout=10.0)
        return super().launch(plan)


NAMESPACE = KVNamespace(b"fake", "float32", LAYOUT.layout_id, BLOCK_SIZE)


def make_node(
    runner: Runner | None = None,
    connector: HostConnector | None = None,
    *,
    node_id: str = "node",
    epoch: int = EPOCH,
    namespace: KVNamespace = NAMESPACE,
) -> Node:
    connector = connector or InProcessConnector(InProcessHub())
    connector.allocate(LAYOUT, NUM_BLOCKS, node_id=node_id, epoch=epoch)
    engine = Engine(
        SchedulerConfig(
            BLOCK_SIZE,
            max_num_seqs=16,
            max_num_batched_tokens=16,
            max_num_mixed_tokens=16,
            max_model_len=NUM_BLOCKS * BLOCK_SIZE,
        ),
        runner or FakeRunner(NUM_BLOCKS, BLOCK_SIZE),
        BlockPool(NUM_BLOCKS, retract=connector.retract),
        namespace,
        eos_token_ids=(),
        publish=True,
    )
    identity = NodeIdentity(node_id, epoch, namespace, VOCAB_SIZE, eos_token_ids=())
    return Node(identity, engine, connector, fetch_timeout=10.0, prefill_rate=PrefillRate())


@asynccontextmanager
async def serving(make: Callable[[Node], ServiceT], node: Node) -> AsyncIterator[ServiceT]:
    service = make(node)
    service.start()
    try:
        yield service
    finally:
        await service.close()
        await node.close()
