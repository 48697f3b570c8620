"""No node is there on which a request could go on: it waits, for as long as it may, and ends with one error."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial

import pytest

from kvrelay.core.backoff import Backoff
from kvrelay.core.errors import DeadlineError, UnavailableError
from kvrelay.core.generation.outputs import FinishReason
from router.nodes.node import NodeState
from tests.router.routed import PROMPT, a_request, assert_idle, begun, expire, give_up, opened, say, take, take_trace
from tests.router.scripted_cluster import Cluster, cluster
from tests.router.scripted_nodes import NAMESPACE, PATIENCE, ScriptedNode, soon, token, until


async def none_lives(nodes: Cluster) -> None:
    """Returns once no decode node is live, and their requests wait for one, after they have looked in vain again."""
    await until(lambda: not nodes.registry.can_serve())
    a_while = asyncio.get_running_loop().time() + 5.0  # further away than the longest wait before looking again

    def all_wait() -> bool:
        groups = [group for run in nodes.relay._running.values() for group in run._groups]
        return all(group.wait is not None and group.wait.when() > a_while for group in groups)

    await until(all_wait)


@pytest.mark.parametrize("epoch", [1, 2])
async def test_a_request_waits_for_a_decode_node_while_none_lives(epoch: int) -> None:
    """Once a node is live, each output is placed exactly once, whether the node has a new epoch or not."""
    async with cluster(max_node_losses=1) as nodes, aclosing(nodes.relay.run(a_request())) as events:
        await begun(nodes, events, token(7))
        await nodes.decode.stop()
        next_event = asyncio.create_task(take(events))
        assert not (await asyncio.wait({next_event}, timeout=0.5))[0], "longer than looking in vain takes"
        await nodes.decode.start_again(epoch=epoch)
        admit = await nodes.decode.admit()
        assert (tuple(admit.prompt_token_ids), admit.num_prior_output_tokens) == ((*PROMPT, 7), 1)
        (await soon(nodes.prefill.calls)).finish(token(8, finish=FinishReason.STOP))
        assert await next_event == token(8, finish=FinishReason.STOP)
        assert (await take_trace(events)).num_migrations == 1
        assert_idle(nodes)


async def test_a_node_that_was_lost_is_not_tried_again_at_once() -> None:
    """It answers, and may fail the request as fast as it gets it."""
    async with cluster(num_prefill_nodes=0) as nodes, aclosing(nodes.relay.run(a_request())) as events:
        first = asyncio.create_task(take(events))
        wire_id = (await nodes.decode.admit()).request_id
        run = nodes.relay._running["r"]
        run._groups[0].backoff = Backoff(first=60.0)
        nodes.decode.failed(wire_id, UnavailableError("the engine has crashed"))
        await until(lambda: run._groups[0].wait is not None)
        assert nodes.decode.commands.empty()
        run.on_decode_node_live()
        last = token(7, finish=FinishReason.STOP)
        say(nodes.decode, (await nodes.decode.admit()).request_id, last)
        assert await first == last


async def test_a_request_that_waited_is_not_placed_again_when_more_nodes_come() -> None:
    """Nor does the end of its wait, if that comes in the same moment as the node, end it."""
    async with cluster(num_decode_nodes=2, num_prefill_nodes=0) as nodes:
        async with aclosing(nodes.relay.run(a_request())) as events:
            first = asyncio.create_task(take(events))
            say(nodes.decode, (await nodes.decode.admit()).request_id, token(7))
            assert await first == token(7)
            next_event = asyncio.create_task(take(events))
            await nodes.decodes[1].stop()
            await until(lambda: nodes.registry.decode[1].state is NodeState.LOST)
            await nodes.decode.stop()
            await none_lives(nodes)
            run = nodes.relay._running["r"]
            [group] = run._groups
            await nodes.decode.start_again(epoch=2)
            admit = await nodes.decode.admit()
            run._inbox.put_nowait(partial(run._on_waited, group))
            await nodes.decodes[1].start_again(epoch=2)
            await until(lambda: nodes.registry.decode[1].state is NodeState.LIVE)
            say(nodes.decode, admit.request_id, token(8, finish=FinishReason.STOP))
            assert await next_event == token(8, finish=FinishReason.STOP)
            assert (await take_trace(events)).num_migrations == 1
            assert nodes.decode.commands.empty() and nodes.decodes[1].commands.empty()


async def test_every_output_waits_for_a_node_on_its_own() -> None:
    """The client needs no more of one of the outputs while they wait."""
    async with cluster(local_prefill_max_tokens=64) as nodes, aclosing(nodes.relay.run(a_request(n=3))) as events:
        first = asyncio.create_task(take(events))
        wire_id = (await nodes.decode.admit()).request_id
        said = [token(10), token(20, index=1), token(30, index=2)]
        say(nodes.decode, wire_id, *said)
        assert [await first, await take(events), await take(events)] == said
        await nodes.decode.stop()
        next_event = asyncio.create_task(take(events))
        await none_lives(nodes)
        nodes.relay.finish("r", 1)
        await nodes.decode.start_again(epoch=2)
        admits = [await nodes.decode.admit() for _ in range(2)]
        assert [admit.first_choice_index for admit in admits] == [0, 2]
        for admit in admits:
            index = admit.first_choice_index
            say(nodes.decode, admit.request_id, token(50, index=index, finish=FinishReason.STOP))
        assert {(await next_event), await take(events)} == {
            token(50, index=index, finish=FinishReason.STOP) for index in (0, 2)
        }
        assert (await take_trace(events)).num_migrations == 2
        assert nodes.decode.commands.empty()


async def test_a_wait_of_one_output_lengthens_and_ends_none_of_another() -> None:
    async with cluster(num_prefill_nodes=0) as nodes, aclosing(nodes.relay.run(a_request(n=2))) as events:
        first = asyncio.create_task(take(events))
        wire_id = (await nodes.decode.admit()).request_id
        say(nodes.decode, wire_id, token(7), token(8, index=1))
        assert [await first, await take(events)] == [token(7), token(8, index=1)]
        next_event = asyncio.create_task(take(events))
        run = nodes.relay._running["r"]
        run._groups[0].backoff = Backoff(first=60.0, longest=1000.0, jitter=0.0)
        nodes.decode.failed(wire_id, UnavailableError("the engine has crashed"))
        await until(lambda: len(run._groups) == 2 and all(group.wait is not None for group in run._groups))
        assert [group.backoff.next() for group in run._groups] == [120.0, 120.0], "each has waited once"
        waiting, placed = run._groups
        assert placed.wait is not None
        placed.wait._run()
        assert (await nodes.decode.admit()).first_choice_index == 1
        assert waiting.wait is not None and nodes.decode.commands.empty()
        await give_up(next_event)


def has_another_model(node: ScriptedNode) -> None:
    node.namespace = replace(NAMESPACE, model_fingerprint=b"\x02" * 32)


def takes_fewer_tokens(node: ScriptedNode) -> None:
    node.max_model_len = len(PROMPT) + a_request().sampling.max_tokens - 1


@pytest.mark.parametrize("change", [has_another_model, takes_fewer_tokens])
async def test_a_node_that_would_not_give_the_same_tokens_does_not_go_on_with_a_request(
    change: Callable[[ScriptedNode], None],
) -> None:
    """It takes the place of the only decode node."""
    async with cluster(num_prefill_nodes=0) as nodes, aclosing(nodes.relay.run(a_request())) as events:
        first = asyncio.create_task(take(events))
        say(nodes.decode, (await nodes.decode.admit()).request_id, token(7))
        assert await first == token(7)
        await nodes.decode.stop()
        next_event = asyncio.create_task(take(events))
        await none_lives(nodes)
        change(nodes.decode)
        await nodes.decode.start_again(epoch=2)
        await until(lambda: nodes.registry.decode[0].state is NodeState.LIVE)
        assert not (await asyncio.wait({next_event}, timeout=0.3))[0] and nodes.decode.commands.empty()
        await nodes.decode.stop()
        await none_lives(nodes)
        nodes.decode.namespace, nodes.decode.max_model_len = NAMESPACE, len(PROMPT) + a_request().sampling.max_tokens
        await nodes.decode.start_again(epoch=3)
        admit = await nodes.decode.admit()
        say(nodes.decode, admit.request_id, token(8, finish=FinishReason.STOP))
        assert await next_event == token(8, finish=FinishReason.STOP)


@pytest.mark.parametrize("node_wait", [0.0, 0.5])
async def test_without_any_decode_node_a_request_ends_with_one_error(
    node_wait: float, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has it, too, with the request's name."""
    async with (
        cluster(num_decode_nodes=2, node_wait=node_wait) as nodes,
        aclosing(nodes.relay.run(a_request())) as events,
    ):
        first, call, _ = await opened(nodes, events)
        call.finish(token(7))
        assert await first == token(7)
        for node in nodes.decodes:
            await node.stop()
        with pytest.raises(UnavailableError, match="no decode node came that could go on within") as raised:
            await take(events)
        logged = [record.getMessage() for record in caplog.records]
        assert logged.count(f"request {call.request.request_id}: {raised.value}") == 1
        with pytest.raises(StopAsyncIteration):
            await take(events)
        assert await soon(nodes.prefill.released) == "lease"
        await call.over.wait()
        assert_idle(nodes)


async def test_nodes_that_come_and_go_lengthen_no_wait() -> None:
    async with cluster(node_wait=0.3) as nodes, aclosing(nodes.relay.run(a_request())) as events:
        await begun(nodes, events, token(7))
        await nodes.decode.stop()
        next_event = asyncio.create_task(take(events))
        await until(lambda: not nodes.registry.can_serve())
        [run] = nodes.relay._running.values()
        while not (await asyncio.wait({next_event}, timeout=0.01))[0]:
            run.on_decode_node_live()
        with pytest.raises(UnavailableError, match="no decode node came that could go on within"):
            await next_event


async def test_the_deadline_holds_while_a_request_waits_for_a_node() -> None:
    async with cluster() as nodes, aclosing(nodes.relay.run(a_request())) as events:
        first, _, _ = await opened(nodes, events)
        await nodes.decode.stop()
        await none_lives(nodes)
        expire(nodes)
        with pytest.raises(DeadlineError, match="it waited for a decode node to go on at"):
            await first
        assert_idle(nodes)


@pytest.mark.parametrize("is_lost_before", [True, False])
async def test_a_router_that_stops_does_not_wait_for_a_node(is_lost_before: bool) -> None:
    """A request that has a node would get a minute to end."""
    async with cluster(node_wait=60.0) as nodes, aclosing(nodes.relay.run(a_request())) as events:
        await begun(nodes, events, token(7))
        next_event = asyncio.create_task(take(events))
        if is_lost_before:
            await nodes.decode.stop()
            await none_lives(nodes)
        closing = asyncio.create_task(nodes.relay.close(timeout=60.0))
        if not is_lost_before:
            assert not (await asyncio.wait({closing}, timeout=0.1))[0]
            await nodes.decode.stop()
        with pytest.raises(UnavailableError, match="no decode node came that could go on within"):
            await next_event
        async with asyncio.timeout(PATIENCE):
            await closing
        assert_idle(nodes)


async def test_an_abort_while_a_request_waits_for_a_node_leaves_nothing() -> None:
    async with cluster() as nodes:
        events = nodes.relay.run(a_request())
        call, _ = await begun(nodes, events, token(7))
        await nodes.decode.stop()
        next_event = asyncio.create_task(take(events))
        await none_lives(nodes)
        [group] = nodes.relay._running["r"]._groups
        await give_up(next_event)
        await events.aclose()
        await call.over.wait()
        assert nodes.relay._running == {} and group.wait is None
        assert_idle(nodes)
