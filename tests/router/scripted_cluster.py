"""A relay over scripted nodes, and the registry that knows them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from router.nodes.kv_index import KVIndex
from router.nodes.node import NodeState
from router.nodes.registry import Registry
from router.policies.prefix_aware import PrefixAware
from router.relay.limits import RelayLimits
from router.relay.placer import Placer
from router.relay.recovery_metrics import RecoveryMetrics
from router.relay.relay import ClusterRelay
from tests.router.scripted_nodes import PATIENCE, ScriptedDecode, ScriptedNode, ScriptedPrefill, until


@dataclass(frozen=True, slots=True)
class Cluster:
    """A relay over scripted nodes. `prefill` and `decode` are the first nodes of their kind."""

    prefills: tuple[ScriptedPrefill, ...]
    decodes: tuple[ScriptedDecode, ...]
    registry: Registry
    placer: Placer
    relay: ClusterRelay
    collectors: CollectorRegistry

    @property
    def prefill(self) -> ScriptedPrefill:
        return self.prefills[0]

    @property
    def decode(self) -> ScriptedDecode:
        return self.decodes[0]

    def metric(self, name: str, **labels: str) -> float:
        return self.collectors.get_sample_value(f"kvrelay:{name}", {"model_name": "m", **labels}) or 0.0


@asynccontextmanager
async def registered(
    *nodes: ScriptedNode,
    late: ScriptedNode | None = None,
    silence: float = 5.0,
    timeout: float = PATIENCE,
    vocabulary: bytes = b"",
) -> AsyncIterator[Registry]:
    """Starts a registry of these nodes, without waiting for any of them. `late` has an address but does not answer
    yet."""
    everyone = nodes if late is None else (*nodes, late)
    async with AsyncExitStack() as stack:
        for node in everyone:
            await node.start()
            stack.push_async_callback(node.stop)
        if late is not None:
            await late.stop()
        prefill = [node.address for node in everyone if isinstance(node, ScriptedPrefill)]
        decode = [node.address for node in everyone if isinstance(node, ScriptedDecode)]
        registry = Registry(prefill, decode, KVIndex(1000), timeout=timeout, silence=silence, vocabulary=vocabulary)
        stack.push_async_callback(registry.close)
        registry.start()
        yield registry


@asynccontextmanager
async def cluster(
    *,
    num_prefill_nodes: int = 1,
    num_decode_nodes: int = 1,
    lease_ttl: float = 30.0,
    local_prefill_max_tokens: int = 0,
    max_concurrent_requests: int = 100,
    max_node_losses: int = 3,
    node_wait: float = PATIENCE,
    node_timeout: float = PATIENCE,
    silence: float = 5.0,
    core_table: str = "",
) -> AsyncIterator[Cluster]:
    """Runs a relay over scripted nodes, one of each kind unless told otherwise."""
    prefills = tuple(ScriptedPrefill(f"prefill-{index}") for index in range(num_prefill_nodes))
    decodes = tuple(ScriptedDecode(f"decode-{index}") for index in range(num_decode_nodes))
    for node in (*prefills, *decodes):
        node.core_table = core_table
    collectors = CollectorRegistry()
    async with registered(*prefills, *decodes, silence=silence) as registry:
        limits = RelayLimits(
            max_concurrent_requests=max_concurrent_requests,
            max_node_losses=max_node_losses,
            node_wait=node_wait,
            lease_ttl=lease_ttl,
            node_timeout=node_timeout,
        )
        placer = Placer(registry, PrefixAware(local_prefill_max_tokens), limits)
        relay = ClusterRelay(registry, placer, limits, RecoveryMetrics("m", collectors))
        try:
            await settled(registry)
            yield Cluster(prefills, decodes, registry, placer, relay, collectors)
        finally:
            await relay.close(timeout=0.0)


async def settled(registry: Registry) -> None:
    """Returns when the registry knows of every node what to make of it. On a busy machine the first attempt to reach
    one may fail, whereupon the registry itself waits no longer for it."""
    async with asyncio.timeout(PATIENCE):
        await registry.wait_settled()
    await until(lambda: all(node.state is not NodeState.CONNECTING for node in registry.nodes))
