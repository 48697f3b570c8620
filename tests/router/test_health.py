"""What the router makes of nodes that fall silent, fail, restart, or do not fit."""

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace

import grpc
import pytest
from prometheus_client import CollectorRegistry

from kvrelay.core.errors import InvalidRequestError, KVRelayError, OverloadedError, UnavailableError
from kvrelay.core.node_report import NodeRole
from kvrelay.core.outputs import FinishReason, TokenOutput
from kvrelay.core.sampling_params import SamplingParams
from kvrelay.v1 import node_pb2
from router.nodes.kv_index import KVIndex
from router.nodes.node import NodeState
from router.nodes.node_metrics import NodeMetrics
from router.nodes.registry import Registry
from router.request import RequestEvent, RoutedRequest
from tests.router.scripted_nodes import (
    NAMESPACE,
    PATIENCE,
    Cluster,
    ScriptedDecode,
    ScriptedNode,
    ScriptedPrefill,
    cluster,
    registered,
    soon,
    token,
)

REQUEST = RoutedRequest("r", tuple(range(200, 210)), SamplingParams(seed=1), timeout=60.0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.005)


async def collected(nodes: Cluster, request: RoutedRequest) -> list[RequestEvent]:
    async with aclosing(nodes.relay.run(request)) as events:
        return [event async for event in events]


def fall_silent(node: ScriptedNode) -> None:
    node.is_silent = True


# -- stopped, not dead -------------------------------------------------------------------------------------------------


async def test_a_decode_node_that_falls_silent_loses_its_requests_to_another() -> None:
    """Its connection and its streams stay open, as those of a stopped process do."""
    async with cluster(num_prefill_nodes=0, num_decode_nodes=2, silence=1.0) as nodes:
        serving = asyncio.create_task(collected(nodes, REQUEST))
        async with asyncio.timeout(PATIENCE):
            while all(decode.commands.empty() for decode in nodes.decodes):
                await asyncio.sleep(0.005)
        [first] = [decode for decode in nodes.decodes if not decode.commands.empty()]
        [second] = [decode for decode in nodes.decodes if decode is not first]
        admit = await first.admit()
        first.tokens(admit.request_id, token(1))
        fall_silent(first)
        again = await second.admit()
        assert tuple(again.prompt_token_ids) == (*REQUEST.prompt_token_ids, 1)
        handle = nodes.registry.decode[nodes.decodes.index(first)]
        assert handle.state is NodeState.LOST
        assert nodes.registry.live(NodeRole.DECODE) == [nodes.registry.decode[nodes.decodes.index(second)]]
        first.tokens(admit.request_id, token(99))  # it was on its way; nobody listens any more
        second.tokens(again.request_id, token(2, finish=FinishReason.LENGTH))
        events = await serving
        assert [event.token_ids for event in events if isinstance(event, TokenOutput)] == [(1,), (2,)]
        first.is_silent = False
        first.update(0)
        await until(lambda: handle.state is NodeState.LIVE)
        assert (await soon(first.watch_requests)).epoch == 0
        resumed = await soon(first.watch_requests)
        assert resumed.epoch == 1, "the index goes on from the sequence number it knows"


async def test_a_prefill_node_that_falls_silent_is_replaced() -> None:
    async with cluster(num_prefill_nodes=2, silence=1.0) as nodes:
        serving = asyncio.create_task(collected(nodes, REQUEST))
        async with asyncio.timeout(PATIENCE):
            while all(prefill.calls.empty() for prefill in nodes.prefills):
                await asyncio.sleep(0.005)
        [first] = [prefill for prefill in nodes.prefills if not prefill.calls.empty()]
        [second] = [prefill for prefill in nodes.prefills if prefill is not first]
        call = await soon(first.calls)
        call.accept("lease")
        fall_silent(first)
        again = await soon(second.calls)
        async with asyncio.timeout(PATIENCE):
            await call.over.wait()  # when it goes on it finds the call cancelled
        again.accept("lease-2")
        again.finish(token(7, finish=FinishReason.LENGTH))
        again.end()
        events = await serving
        assert [event.token_ids for event in events if isinstance(event, TokenOutput)] == [(7,)]


async def test_a_router_that_was_held_up_loses_no_node() -> None:
    """Silence is counted in its own ticks."""
    async with cluster(silence=1.0) as nodes:
        asyncio.get_running_loop().call_soon(time.sleep, 2.0)
        for _ in range(20):
            await asyncio.sleep(0.01)
        assert [node.state for node in nodes.registry.nodes] == [NodeState.LIVE] * 2


# -- failing -----------------------------------------------------------------------------------------------------------


async def failed_once(nodes: Cluster, decode: ScriptedDecode, number: int) -> None:
    serving = asyncio.create_task(collected(nodes, replace(REQUEST, request_id=f"f{number}")))
    admit = await decode.admit()
    decode.failed(admit.request_id, grpc.StatusCode.INTERNAL, "out of luck")
    with pytest.raises(KVRelayError, match="out of luck"):
        await serving


async def test_a_node_that_fails_its_requests_is_ejected_unless_it_is_the_last_one() -> None:
    async with cluster(num_prefill_nodes=0, num_decode_nodes=2, silence=30.0) as nodes:
        bad, good = nodes.registry.decode
        await nodes.decodes[1].stop()
        await until(lambda: good.state is NodeState.LOST)
        for number in range(5):
            await failed_once(nodes, nodes.decodes[0], number)
        assert bad.outlier.is_ejected
        assert nodes.registry.live(NodeRole.DECODE) == [bad], "the last one"
        assert nodes.registry.state_of(bad) is NodeState.LIVE
        await nodes.decodes[1].start()
        nodes.decodes[1].update(0, reset=True)
        await until(lambda: good.state is NodeState.LIVE)
        if bad.outlier.is_ejected:  # it lasts for a few seconds only
            assert nodes.registry.live(NodeRole.DECODE) == [good]
            assert nodes.registry.state_of(bad) is NodeState.EJECTED


async def test_a_restart_ends_an_ejection() -> None:
    async with cluster(num_prefill_nodes=0, silence=30.0) as nodes:
        [node] = nodes.registry.decode
        for _ in range(5):
            node.outlier.failed(KVRelayError("internal error"))
        await nodes.decode.stop()
        await until(lambda: node.state is NodeState.LOST)
        nodes.decode.epoch = 2
        nodes.decode.update(0, reset=True)
        await nodes.decode.start()
        await until(lambda: node.state is NodeState.LIVE)
        assert not node.outlier.is_ejected


# -- not fitting -------------------------------------------------------------------------------------------------------


async def states(*nodes: ScriptedNode) -> tuple[list[NodeState], str]:
    """Of the nodes as the router sees them, and what it says when nothing can serve."""
    async with registered(*nodes) as registry:
        assert await registry.wait_settled(PATIENCE)
        try:
            registry.served_model()
        except UnavailableError as error:
            return [node.state for node in registry.nodes], str(error)
        return [node.state for node in registry.nodes], ""


def other(node: ScriptedNode) -> ScriptedNode:
    node.namespace = replace(NAMESPACE, block_size=16)
    return node


async def test_the_minority_is_refused_wherever_it_is_listed() -> None:
    nodes = [other(ScriptedDecode()), ScriptedDecode("decode-1"), ScriptedPrefill()]
    found, _ = await states(*nodes)
    assert found == [NodeState.LIVE, NodeState.REFUSED, NodeState.LIVE]


async def test_of_two_that_do_not_fit_the_decode_node_stays() -> None:
    found, _ = await states(ScriptedPrefill(), other(ScriptedDecode()))
    assert found == [NodeState.REFUSED, NodeState.LIVE]


async def test_who_answers_first_changes_nothing() -> None:
    for _ in range(5):
        found, _ = await states(ScriptedDecode(), other(ScriptedDecode("decode-1")))
        assert found == [NodeState.LIVE, NodeState.REFUSED]


async def test_when_nothing_can_serve_the_error_says_why() -> None:
    nodes = [ScriptedPrefill(), ScriptedPrefill("prefill-1"), other(ScriptedDecode())]
    found, why = await states(*nodes)
    assert found == [NodeState.LIVE, NodeState.LIVE, NodeState.REFUSED]
    assert f"decode-0 ({nodes[2].address}) is refused: block size is 16, not 4 (as prefill-" in why


# -- limits and numbers ------------------------------------------------------------------------------------------------


async def test_waiting_requests_count_and_their_deadline_holds() -> None:
    async with cluster(num_prefill_nodes=0, max_concurrent_requests=1) as nodes:
        waiting = asyncio.create_task(collected(nodes, replace(REQUEST, timeout=0.3)))
        await nodes.decode.admit()  # and nothing more: it waits there
        with pytest.raises(OverloadedError, match="1 requests are running or waiting"):
            nodes.relay.check_capacity()
        with pytest.raises(OverloadedError):
            await collected(nodes, replace(REQUEST, request_id="second"))
        with pytest.raises(KVRelayError, match=r"longer than 0\.3 seconds"):
            await waiting
        nodes.relay.check_capacity()
        with pytest.raises(OverloadedError):
            nodes.relay.check_capacity(1)


async def test_a_call_of_many_prompts_needs_room_for_all_of_them() -> None:
    async with cluster(num_prefill_nodes=0, max_concurrent_requests=3) as nodes:
        nodes.relay.check_capacity(0, 3)
        with pytest.raises(OverloadedError):
            nodes.relay.check_capacity(1, 3)
        with pytest.raises(InvalidRequestError, match="prompt has 4 entries, more than the 3 requests"):
            nodes.relay.check_capacity(0, 4)


async def test_everything_of_a_node_is_in_the_metrics() -> None:
    async with cluster(silence=30.0) as nodes:
        collectors = CollectorRegistry()
        collectors.register(NodeMetrics(nodes.registry))
        stats = node_pb2.NodeStats(num_leases_released=7, num_leases_expired=2, num_leases_ended_early=1)
        connector = stats.connectors.add(connector="ucx", counters={"bytes_fetched": 4096, "missing": 3, "new": 1})
        connector.refused["digest"] = 5
        nodes.prefill.updates.put_nowait(
            node_pb2.WatchResponse(
                epoch=1, load=node_pb2.NodeLoad(num_leases=4, num_steps=9, num_lent_steps=2), stats=stats
            )
        )
        await until(lambda: nodes.registry.prefill[0].load.num_leases == 4)

        def value(name: str, **labels: str) -> float | None:
            node = {"node": "prefill-0", "role": "prefill"}
            return collectors.get_sample_value(f"kvrelay:{name}", {**node, **labels})

        assert value("node_leases") == 4
        assert value("node_steps_total", cores="own") == 7
        assert value("node_steps_total", cores="lent") == 2
        assert value("node_leases_ended_total", how="released") == 7
        assert value("node_leases_ended_total", how="expired") == 2
        assert value("node_leases_ended_total", how="early") == 1
        assert value("kv_bytes_fetched_total", connector="ucx") == 4096
        assert value("kv_blocks_missing_total", connector="ucx") == 3
        assert value("kv_blocks_refused_total", connector="ucx", cause="digest") == 5
        assert value("node_state", state="live") == 1
        assert value("node_state", state="lost") == 0
        assert value("node_ejections_total") == 0
        age = value("node_heartbeat_age_seconds")
        assert age is not None and age >= 0


async def test_two_addresses_of_one_id_are_two_series() -> None:
    """A scrape with the same series twice would be refused as a whole."""
    one, two = ScriptedDecode(), ScriptedDecode()
    async with AsyncExitStack() as stack:
        for node in (one, two):
            await node.start()
            stack.push_async_callback(node.stop)
        registry = Registry([], [one.address, two.address], KVIndex(10), timeout=PATIENCE, silence=5.0)
        stack.push_async_callback(registry.close)
        registry.start()
        assert await registry.wait_settled(PATIENCE)
        assert [node.state for node in registry.nodes] == [NodeState.LIVE, NodeState.REFUSED]
        families = NodeMetrics(registry).collect()
        up = next(family for family in families if family.name == "kvrelay:node_up")
        assert [(sample.labels["node"], sample.value) for sample in up.samples] == [("decode-0", 1), (two.address, 0)]
