"""What the router does about nodes that fall silent, fail, restart, or do not fit."""

import asyncio
import time
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace

import pytest

from kvrelay.core.backoff import Backoff
from kvrelay.core.errors import KVRelayError, UnavailableError
from kvrelay.core.generation.outputs import FinishReason, TokenOutput
from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.core.node_report import NodeRole
from kvrelay.v1 import node_pb2
from router.nodes.kv_index import KVIndex
from router.nodes.node import NodeState
from router.nodes.registry import Registry
from router.request import RoutedRequest
from tests.chaos.proxy import Proxy
from tests.router.routed import collected, give_up, take, take_trace
from tests.router.scripted_cluster import Cluster, cluster, registered, settled
from tests.router.scripted_nodes import (
    NAMESPACE,
    PATIENCE,
    ScriptedDecode,
    ScriptedNode,
    ScriptedPrefill,
    soon,
    token,
    until,
)

REQUEST = RoutedRequest("r", tuple(range(200, 210)), SamplingParams(seed=1), NAMESPACE, timeout=60.0)


def fall_silent(node: ScriptedNode) -> None:
    node.is_silent = True


# -- stopped, not dead -------------------------------------------------------------------------------------------------


async def test_a_decode_node_that_falls_silent_loses_its_requests_to_another() -> None:
    """The connection and the streams of a silent node stay open, as those of a stopped process do."""
    async with cluster(num_prefill_nodes=0, num_decode_nodes=2, silence=1.0) as nodes:
        serving = asyncio.create_task(collected(nodes, REQUEST))
        await until(lambda: any(not decode.commands.empty() for decode in nodes.decodes))
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


async def test_a_connection_over_which_nothing_comes_is_not_given_up_before_its_node_may_be_silent() -> None:
    """Not even if gRPC waits for the answer to a ping: it would be the one to decide when the node is lost."""
    async with AsyncExitStack() as stack:
        node = ScriptedDecode()
        await node.start()
        stack.push_async_callback(node.stop)
        proxy = Proxy(node.port)
        await proxy.start()
        stack.push_async_callback(proxy.close)
        registry = Registry([], [proxy.address], KVIndex(1), timeout=PATIENCE, silence=6.0)
        stack.push_async_callback(registry.close)
        registry.start()
        [handle] = registry.decode
        await until(lambda: handle.state is NodeState.LIVE)
        proxy.silence()
        await until(lambda: handle.state is NodeState.LOST)
        assert handle.complaint == "nothing was heard of it for 6 seconds"


async def test_a_prefill_node_that_falls_silent_is_replaced() -> None:
    async with cluster(num_prefill_nodes=2, silence=1.0) as nodes:
        serving = asyncio.create_task(collected(nodes, REQUEST))
        await until(lambda: any(not prefill.calls.empty() for prefill in nodes.prefills))
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
    """Silence is counted in ticks of the router's own loop."""
    async with cluster(silence=1.0) as nodes:
        asyncio.get_running_loop().call_soon(time.sleep, 2.0)
        for _ in range(20):
            await asyncio.sleep(0.01)
        assert [node.state for node in nodes.registry.nodes] == [NodeState.LIVE] * 2


# -- failing -----------------------------------------------------------------------------------------------------------


async def failed_once(nodes: Cluster, decode: ScriptedDecode, number: int) -> None:
    serving = asyncio.create_task(collected(nodes, replace(REQUEST, request_id=f"f{number}")))
    admit = await decode.admit()
    decode.failed(admit.request_id, KVRelayError("out of luck"))
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
        assert not nodes.registry.is_ejected(bad)
        await nodes.decodes[1].start()
        nodes.decodes[1].update(0, reset=True)
        await until(lambda: good.state is NodeState.LIVE)
        if bad.outlier.is_ejected:  # it lasts for a few seconds only
            assert nodes.registry.live(NodeRole.DECODE) == [good]
            assert nodes.registry.is_ejected(bad) and not nodes.registry.is_ejected(good)


async def test_an_output_that_the_edge_has_ended_clears_the_failures_before_it() -> None:
    """Such as by a stop string, of which the node knows nothing."""
    async with cluster(num_prefill_nodes=0, silence=30.0) as nodes:
        [node] = nodes.registry.decode
        for number in range(4):
            await failed_once(nodes, nodes.decode, number)
        async with aclosing(nodes.relay.run(REQUEST)) as events:
            first = asyncio.create_task(take(events))
            nodes.decode.tokens((await nodes.decode.admit()).request_id, token(7))
            assert await first == token(7)
            nodes.relay.finish(REQUEST.request_id, 0)
            await take_trace(events)
        await nodes.decode.aborted()
        await failed_once(nodes, nodes.decode, 4)
        assert not node.outlier.is_ejected


async def test_an_output_that_ended_without_a_token_of_the_decode_node_clears_nothing() -> None:
    async with cluster(silence=30.0) as nodes:
        [node] = nodes.registry.decode
        for _ in range(4):
            node.outlier.failed(KVRelayError("out of luck"))
        async with aclosing(nodes.relay.run(REQUEST)) as events:
            first = asyncio.create_task(take(events))
            await nodes.decode.admit()
            (await soon(nodes.prefill.calls)).finish(token(7))
            assert await first == token(7)
            nodes.relay.finish(REQUEST.request_id, 0)
            await take_trace(events)
        node.outlier.failed(KVRelayError("out of luck"))
        assert node.outlier.is_ejected


async def test_an_output_that_ends_clears_the_failures_of_its_decode_node() -> None:
    async with cluster(num_prefill_nodes=0, silence=30.0) as nodes:
        [node] = nodes.registry.decode
        for _ in range(4):
            node.outlier.failed(KVRelayError("out of luck"))
        serving = asyncio.create_task(collected(nodes, REQUEST))
        nodes.decode.tokens((await nodes.decode.admit()).request_id, token(7, finish=FinishReason.STOP))
        await serving
        node.outlier.failed(KVRelayError("out of luck"))
        assert not node.outlier.is_ejected


async def test_an_output_that_ended_at_the_process_before_clears_nothing() -> None:
    """A client may take the end of an answer long after its node has computed it."""
    async with cluster(num_prefill_nodes=0, silence=30.0) as nodes:
        [node] = nodes.registry.decode
        for _ in range(4):
            node.outlier.failed(KVRelayError("out of luck"))
        node.succeeded(replace(node.source, epoch=0))
        node.outlier.failed(KVRelayError("out of luck"))
        assert node.outlier.is_ejected


@pytest.mark.parametrize("fails_early", [True, False])
async def test_a_prefill_that_fails_counts_against_its_node_and_a_first_token_clears_that(fails_early: bool) -> None:
    async with cluster(silence=30.0) as nodes:
        [node] = nodes.registry.prefill
        for _ in range(4):
            node.outlier.failed(KVRelayError("out of luck"))
        async with aclosing(nodes.relay.run(REQUEST)) as events:
            first = asyncio.create_task(take(events))
            await nodes.decode.admit()
            call = await soon(nodes.prefill.calls)
            if not fails_early:
                call.finish(token(7))
                assert await first == token(7)
                first = asyncio.create_task(take(events))
                await nodes.decode.started()
            call.end(UnavailableError("died"))
            await (nodes.decode.aborted() if fails_early else nodes.decode.pull())
            assert node.outlier.is_ejected is fails_early
            for _ in range(3):
                node.outlier.failed(KVRelayError("out of luck"))
            assert node.outlier.is_ejected is fails_early
            node.outlier.failed(KVRelayError("out of luck"))
            assert node.outlier.is_ejected, "the failure after the first token was one of five"
            await give_up(first)


async def test_a_request_that_fits_only_an_ejected_node_goes_there() -> None:
    async with cluster(num_prefill_nodes=0, num_decode_nodes=2, silence=30.0) as nodes:
        long, short = nodes.decodes
        await short.stop()
        await until(lambda: nodes.registry.decode[1].state is NodeState.LOST)
        short.max_model_len = len(REQUEST.prompt_token_ids) + REQUEST.sampling.max_tokens - 1
        await short.start_again(epoch=2)
        await until(lambda: nodes.registry.decode[1].state is NodeState.LIVE)
        for _ in range(5):
            nodes.registry.decode[0].outlier.failed(KVRelayError("out of luck"))
        async with aclosing(nodes.relay.run(REQUEST)) as events:
            first = asyncio.create_task(take(events))
            long.tokens((await long.admit()).request_id, token(7))
            assert await first == token(7)


@pytest.mark.parametrize("drains", [True, False])
async def test_a_node_that_ends_with_all_its_requests_is_not_ejected(drains: bool) -> None:
    """It has drained for as long as it may, or has fallen silent."""
    async with cluster(num_prefill_nodes=0, silence=1.0) as nodes:
        [node] = nodes.registry.decode
        serving = [asyncio.create_task(collected(nodes, replace(REQUEST, request_id=f"e{i}"))) for i in range(6)]
        for _ in serving:
            await nodes.decode.admit()
        if drains:
            nodes.decode.update(1, draining=True)
            await until(lambda: node.state is NodeState.DRAINING)
            nodes.decode.end_stream()
        else:
            fall_silent(nodes.decode)
        await until(lambda: node.num_sequences == 0)
        assert node.outlier.num_ejections == 0
        for task in serving:
            await give_up(task)


async def test_a_restart_ends_an_ejection() -> None:
    async with cluster(num_prefill_nodes=0, silence=30.0) as nodes:
        [node] = nodes.registry.decode
        for _ in range(5):
            node.outlier.failed(KVRelayError("internal error"))
        await nodes.decode.stop()
        await until(lambda: node.state is NodeState.LOST)
        assert not nodes.registry.is_ejected(node), "it is lost, and its ejection says nothing any more"
        nodes.decode.epoch = 2
        nodes.decode.update(0, reset=True)
        await nodes.decode.start()
        await until(lambda: node.state is NodeState.LIVE)
        assert not node.outlier.is_ejected


async def test_each_outage_begins_with_the_shortest_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a node that was once away for long would come back late from each restart."""
    waits: list[float] = []

    class Recorded(Backoff):
        def next(self) -> float:
            waits.append(super().next())
            return waits[-1]

    monkeypatch.setattr("router.nodes.registry.Backoff", Recorded)
    node = ScriptedDecode()
    async with registered(node) as registry:
        [handle] = registry.decode
        await until(lambda: handle.state is NodeState.LIVE)
        await node.stop()
        await until(lambda: handle.state is NodeState.LOST)
        num_before = len(waits)
        await until(lambda: len(waits) >= num_before + 3)
        await node.start_again(epoch=2)
        await until(lambda: handle.state is NodeState.LIVE)
        num_before = len(waits)
        await node.stop()
        await until(lambda: len(waits) > num_before)
        assert waits[num_before] <= 0.1 < max(waits)


# -- not fitting -------------------------------------------------------------------------------------------------------


async def states(*nodes: ScriptedNode) -> tuple[list[NodeState], str]:
    """Returns the states in which the router sees these nodes, and its error if nothing can be served."""
    async with registered(*nodes) as registry:
        await settled(registry)
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


class HeldDecode(ScriptedDecode):
    """A node that does not describe itself before it may."""

    def __init__(self, node_id: str) -> None:
        super().__init__(node_id)
        self.may_answer = asyncio.Event()

    async def Describe(self, request: node_pb2.DescribeRequest, context: object) -> node_pb2.DescribeResponse:
        await self.may_answer.wait()
        return await super().Describe(request, context)


async def test_of_two_with_one_id_the_one_listed_first_stays_though_it_answers_last() -> None:
    first, second = HeldDecode("same"), ScriptedDecode("same")
    async with registered(first, second) as registry:
        await until(lambda: registry.decode[1].description is not None)
        first.may_answer.set()
        await settled(registry)
        assert [node.state for node in registry.decode] == [NodeState.LIVE, NodeState.REFUSED]


async def test_when_nothing_can_serve_the_error_says_why() -> None:
    nodes = [ScriptedPrefill(), ScriptedPrefill("prefill-1"), other(ScriptedDecode())]
    found, why = await states(*nodes)
    assert found == [NodeState.LIVE, NodeState.LIVE, NodeState.REFUSED]
    assert f"decode-0 ({nodes[2].address}) is refused: block size is 16, not 4 (as prefill-" in why
