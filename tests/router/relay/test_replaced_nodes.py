"""A node that another process has replaced at its address, of which the router has not heard yet: the new one does not
take what was meant for the old one. Nodes are real, but for the model."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from decode_node.service import DecodeService
from kv_connector.in_process import InProcessConnector, InProcessHub
from kvrelay.core.errors import UnavailableError
from kvrelay.core.generation.outputs import TokenOutput
from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.core.kv.block_hash import KVNamespace
from kvrelay.core.tasks import end_tasks
from kvrelay.node.server import NodeServer
from prefill_node.service import PrefillService
from router.nodes.kv_index import KVIndex
from router.nodes.registry import Registry
from router.policies.prefix_aware import PrefixAware
from router.relay.limits import RelayLimits
from router.relay.placer import Placer
from router.relay.recovery_metrics import RecoveryMetrics
from router.relay.relay import ClusterRelay
from router.request import RequestEvent, RequestTrace, RoutedRequest
from tests.engine.fake_runner import FakeRunner
from tests.node.fake_node import BLOCK_SIZE, NAMESPACE, NUM_BLOCKS, make_node
from tests.router.scripted_cluster import settled
from tests.router.scripted_nodes import PATIENCE, until

REQUEST = RoutedRequest(
    "r", tuple(range(100, 120)), SamplingParams(max_tokens=3, temperature=0.0, seed=0), NAMESPACE, timeout=60.0
)


class Nodes:
    """A prefill and a decode node, which can be replaced, and a relay that gives no request a second attempt at a node
    that it may have ended."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._hub = InProcessHub()

    async def start(self) -> None:
        self.prefill = await self._serve(PrefillService, 0, epoch=1)
        self.decode = await self._serve(DecodeService, 0, epoch=1)
        prefill, decode = (f"127.0.0.1:{port}" for _, port in (self.prefill, self.decode))
        self.registry = Registry([prefill], [decode], KVIndex(1000), timeout=10.0, silence=10.0)
        self._stack.push_async_callback(self.registry.close)
        limits = RelayLimits(
            max_concurrent_requests=1, max_node_losses=0, node_wait=1.0, lease_ttl=30.0, node_timeout=10.0
        )
        placer = Placer(self.registry, PrefixAware(local_prefill_max_tokens=0), limits)
        self.relay = ClusterRelay(self.registry, placer, limits, RecoveryMetrics("m", CollectorRegistry()))
        self._stack.push_async_callback(self.relay.close, timeout=0.0)
        self.registry.start()
        await settled(self.registry)

    async def replace_decode_node(self, namespace: KVNamespace = NAMESPACE) -> None:
        """Replaces the decode node by one with this namespace. The router does not hear of it."""
        server, port = self.decode
        await end_tasks(*self.registry._tasks)
        await server.close()
        self.decode = await self._serve(DecodeService, port, epoch=2, namespace=namespace)

    async def replace_prefill_node(self) -> None:
        server, port = self.prefill
        await end_tasks(*self.registry._tasks)
        await server.close()
        self.prefill = await self._serve(PrefillService, port, epoch=2)

    async def _serve(
        self,
        service: type[PrefillService | DecodeService],
        port: int,
        *,
        epoch: int,
        namespace: KVNamespace = NAMESPACE,
    ) -> tuple[NodeServer, int]:
        runner, connector = FakeRunner(NUM_BLOCKS, BLOCK_SIZE), InProcessConnector(self._hub)
        runner.pool = [[0] * BLOCK_SIZE for _ in runner.pool]  # it does not see what is fetched
        node = make_node(runner, connector, node_id=service.name, epoch=epoch, namespace=namespace)
        server = NodeServer(node, service(node))
        self._stack.push_async_callback(server.close)
        return server, await server.start("127.0.0.1", port)


@asynccontextmanager
async def nodes_and_relay() -> AsyncIterator[Nodes]:
    async with AsyncExitStack() as stack:
        nodes = Nodes(stack)
        await nodes.start()
        yield nodes


async def lost_once(nodes: Nodes) -> "asyncio.Task[list[RequestEvent]]":
    """Returns the task that serves the request once that has lost a node."""
    serving = asyncio.create_task(serve(nodes))
    await until(lambda: "r" in nodes.relay._running and bool(nodes.relay._running["r"]._lost))
    return serving


async def serve(nodes: Nodes) -> list[RequestEvent]:
    async with asyncio.timeout(PATIENCE), aclosing(nodes.relay.run(REQUEST)) as events:
        return [event async for event in events]


def check(events: list[RequestEvent]) -> None:
    """Checks that a request has all its tokens, after it was placed again."""
    *outputs, trace = events
    assert isinstance(trace, RequestTrace) and trace.num_migrations > 0
    tokens = [token for output in outputs if isinstance(output, TokenOutput) for token in output.token_ids]
    assert len(tokens) == REQUEST.sampling.max_tokens


async def test_a_request_for_a_decode_node_that_was_replaced_goes_on_once_the_router_knows_the_other() -> None:
    async with nodes_and_relay() as nodes:
        await nodes.replace_decode_node()
        serving = await lost_once(nodes)
        nodes.registry.start()
        check(await serving)


async def test_a_request_is_not_computed_by_a_node_with_another_model_than_the_one_it_was_meant_for() -> None:
    async with nodes_and_relay() as nodes:
        await nodes.replace_decode_node(replace(NAMESPACE, model_fingerprint=b"another"))
        serving = await lost_once(nodes)
        nodes.registry.start()
        with pytest.raises(UnavailableError, match="is another process than the one that was meant, of epoch 0x1"):
            await serving


async def test_a_prompt_for_a_prefill_node_that_was_replaced_is_computed_elsewhere() -> None:
    async with nodes_and_relay() as nodes:
        await nodes.replace_prefill_node()
        check(await serve(nodes))
