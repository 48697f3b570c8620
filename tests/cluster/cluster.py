"""A whole cluster in one process, with real engines, gRPC and connectors: fast enough to run every model family.

At the end it fails when anything is left: blocks, leases, requests.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from prometheus_client import CollectorRegistry

from decode_node.service import DecodeService
from kvrelay.core.generation.outputs import TokenLogprobs
from kvrelay.core.generation.prompt_logprobs import PromptLogprobs
from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.core.kv.block_hash import KVNamespace
from kvrelay.core.node_report import NodeRole
from kvrelay.engine.engine import Engine
from kvrelay.node.node import Node
from kvrelay.node.server import NodeServer
from kvrelay.node.settings import NodeSettings
from kvrelay.node.startup import build_node
from prefill_node.service import PrefillService
from router.nodes.kv_index import KVIndex
from router.nodes.registry import Registry
from router.policies.choice import make_policy
from router.policies.placement import Policy
from router.relay.limits import RelayLimits
from router.relay.placer import Placer
from router.relay.recovery_metrics import RecoveryMetrics
from router.relay.relay import ClusterRelay
from router.request import RequestTrace, RoutedRequest

_IDLE_SECONDS = 20.0
_NODE_WAIT_SECONDS = 1.0  # who is killed here stays away
_TURN_SECONDS = 0.001  # between two looks at an engine that has nothing to do yet


@dataclass(slots=True)
class Served:
    """Everything that a request brought."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    trace: RequestTrace | None = None

    @property
    def how(self) -> RequestTrace:
        assert self.trace is not None
        return self.trace


@dataclass(slots=True)
class Cluster:
    """A running cluster. `nodes` are those that live."""

    relay: ClusterRelay
    registry: Registry
    nodes: list[Node]
    servers: dict[str, NodeServer]
    collectors: CollectorRegistry
    _number: int = 0

    @property
    def kv_namespace(self) -> KVNamespace:
        """Returns the namespace of every node."""
        return self.nodes[0].identity.kv_namespace

    def metric(self, name: str, **labels: str) -> float:
        """Returns the sum of a metric's samples that have these labels."""
        return sum(
            sample.value
            for family in self.collectors.collect()
            for sample in family.samples
            if sample.name == f"kvrelay:{name}" and labels.items() <= sample.labels.items()
        )

    async def kill(self, node_id: str) -> None:
        """Ends a node's streams and its port at once, as the death of its process does."""
        self.nodes.remove(self.node(node_id))
        await self.servers[node_id]._server.stop(grace=None)

    def node(self, node_id: str) -> Node:
        return next(node for node in self.nodes if node.identity.node_id == node_id)

    def hold(self, node_id: str, *, num_tokens: int = 0) -> threading.Event:
        """Holds up the node's engine until the returned event is set: before its next step, or before the one that
        follows when the outputs it is generating have so many tokens together."""
        gate = threading.Event()
        engine_thread = self.node(node_id).engine_thread

        def message(engine: Engine) -> None:
            generated = sum(s.num_output_tokens for sequences in engine._sequences.values() for s in sequences)
            if generated >= num_tokens:
                assert gate.wait(_IDLE_SECONDS)
            elif generated or not gate.wait(_TURN_SECONDS):
                engine_thread.post(message)

        engine_thread.post(message)
        return gate

    async def wait_admitted(self, node_id: str) -> None:
        """Returns once the decode node holds blocks for a request."""
        node = self.node(node_id)
        async with asyncio.timeout(_IDLE_SECONDS):
            while node.event_log.load.num_requests_running == 0:
                await asyncio.sleep(0.002)

    async def generate(
        self,
        prompt: Sequence[int],
        *,
        cache_salt: bytes = b"",
        on_tokens: Callable[[int], None] = lambda num_tokens: None,
        **sampling: Any,
    ) -> Served:
        """Serves a request. `on_tokens` is called with the number of tokens so far, over all outputs."""
        params = SamplingParams(**{"temperature": 0.0, "seed": 0, "ignore_eos": True, **sampling})
        self._number += 1
        request = RoutedRequest(
            f"r{self._number}", tuple(prompt), params, self.kv_namespace, cache_salt=cache_salt, timeout=120.0
        )
        served = Served()
        async with aclosing(self.relay.run(request)) as events:
            async for event in events:
                match event:
                    case RequestTrace():
                        served.trace = event
                    case PromptLogprobs():
                        served.prompt_logprobs = tuple(event)
                    case output:
                        served.tokens.setdefault(output.index, []).extend(output.token_ids)
                        served.logprobs.setdefault(output.index, []).extend(output.logprobs)
                        on_tokens(sum(map(len, served.tokens.values())))
        return served

    async def wait_idle(self) -> None:
        """Returns once nothing is left of any request; raises an error that says what is left if that does not
        happen."""
        async with asyncio.timeout(_IDLE_SECONDS):
            for node in self.nodes:
                await self._wait_node_idle(node)

    async def wait_indexed(self) -> None:
        """Returns when the router knows what every node holds."""
        async with asyncio.timeout(_IDLE_SECONDS):
            for node in self.nodes:
                held = node.event_log.since(None).stored
                while any(node.identity.node_id not in self.registry.index.leading([name]) for name in held):
                    await asyncio.sleep(0.01)

    async def _wait_node_idle(self, node: Node) -> None:
        while True:
            try:
                return await node.check_idle()
            except AssertionError:
                # Releases travel behind the last token; the timeout around this says what is left if they never come.
                await asyncio.sleep(0.01)


@asynccontextmanager
async def cluster(
    model: Path,
    *,
    prefill_nodes: int = 1,
    decode_nodes: int = 1,
    policy: Policy | None = None,
    lease_ttl: float = 30.0,
    decode_settings: Mapping[str, Any] = MappingProxyType({}),
    **settings: Any,
) -> AsyncIterator[Cluster]:
    """Runs a cluster. `settings` are those of every node, `decode_settings` those of decode nodes alone. Nothing is
    prefilled on decode nodes unless `policy` says so."""
    servers: dict[str, NodeServer] = {}
    nodes: list[Node] = []
    addresses: dict[NodeRole, list[str]] = {role: [] for role in NodeRole}
    values = {
        "model": str(model),
        "dtype": "float32",
        "num_blocks": 512,
        "max_num_batched_tokens": 256,
        "cluster_secret": "of a test's cluster",
        **settings,
    }
    try:
        for role, count in ((NodeRole.PREFILL, prefill_nodes), (NodeRole.DECODE, decode_nodes)):
            for index in range(count):
                own = {"node_id": f"{role.value}-{index}", **(decode_settings if role is NodeRole.DECODE else {})}
                node = await build_node(NodeSettings.model_validate({**values, **own}), role)
                service = PrefillService(node) if role is NodeRole.PREFILL else DecodeService(node)
                server = NodeServer(node, service)
                servers[node.identity.node_id] = server
                nodes.append(node)
                addresses[role].append(f"127.0.0.1:{await server.start('127.0.0.1', 0)}")
        registry = Registry(
            addresses[NodeRole.PREFILL],
            addresses[NodeRole.DECODE],
            KVIndex(capacity=100_000),
            timeout=5.0,
            silence=5.0,
        )
        registry.start()
        async with asyncio.timeout(20.0):
            await registry.wait_settled()
        assert len(registry.live(NodeRole.PREFILL)) == prefill_nodes
        assert len(registry.live(NodeRole.DECODE)) == decode_nodes
        policy = policy or make_policy("prefix_aware", local_prefill_max_tokens=0)
        limits = RelayLimits(
            max_concurrent_requests=1024,
            max_node_losses=3,
            node_wait=_NODE_WAIT_SECONDS,
            lease_ttl=lease_ttl,
            node_timeout=5.0,
        )
        collectors = CollectorRegistry()
        placer = Placer(registry, policy, limits)
        relay = ClusterRelay(registry, placer, limits, RecoveryMetrics("m", collectors))
        running = Cluster(relay, registry, nodes, servers, collectors)
        try:
            yield running
            await running.wait_idle()
        finally:
            await relay.close(timeout=5.0)
            await registry.close()
    finally:
        for server in servers.values():
            await server.close()
