"""How many nodes a request may lose, since it may be what ends them. The test decides each answer of the nodes."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing

import pytest

from kvrelay.core.backoff import Backoff
from kvrelay.core.errors import GivenUpError, NotTakenError, UnavailableError
from kvrelay.core.generation.outputs import FinishReason
from router.nodes.node import NodeState
from tests.router.routed import a_request, assert_idle, give_up, say, take, take_trace
from tests.router.scripted_cluster import Cluster, cluster
from tests.router.scripted_nodes import PrefillCall, ScriptedDecode, ScriptedNode, soon, token, until


async def next_decode(nodes: Cluster) -> ScriptedDecode:
    """Returns the decode node that is told something next."""
    await until(lambda: any(not node.commands.empty() for node in nodes.decodes))
    return next(node for node in nodes.decodes if not node.commands.empty())


async def ended(nodes: Cluster, node: ScriptedDecode) -> None:
    """Ends a node, and returns once the router knows."""
    await node.stop()
    await until(lambda: nodes.registry.decode[nodes.decodes.index(node)].state is NodeState.LOST)


async def drains(nodes: Cluster, node: ScriptedNode) -> None:
    """Lets a node drain, and returns once the router knows."""
    node.update(1, draining=True)
    handle = next(handle for handle in nodes.registry.nodes if handle.source.node_id == node.node_id)
    await until(lambda: handle.state is NodeState.DRAINING)


async def lose_decode_nodes(nodes: Cluster, count: int) -> list[ScriptedDecode]:
    """Ends so many decode nodes, one after the other, once each has been given the request."""
    lost = []
    for _ in range(count):
        node = await next_decode(nodes)
        await node.admit()
        await ended(nodes, node)
        lost.append(node)
    return lost


async def next_prefill(nodes: Cluster) -> PrefillCall:
    await until(lambda: any(not node.calls.empty() for node in nodes.prefills))
    return next(node.calls.get_nowait() for node in nodes.prefills if not node.calls.empty())


@pytest.mark.parametrize("max_node_losses", [0, 2])
async def test_the_number_of_nodes_that_end_is_bounded(max_node_losses: int) -> None:
    """Nothing more is placed until it is known that they have ended: another process is at their address."""
    async with cluster(num_decode_nodes=5, max_node_losses=max_node_losses, local_prefill_max_tokens=64) as nodes:
        async with aclosing(nodes.relay.run(a_request())) as events:
            first = asyncio.create_task(take(events))
            for node in await lose_decode_nodes(nodes, 1 + max_node_losses):
                assert not first.done()
                await node.start_again(epoch=2)
            with pytest.raises(GivenUpError, match=f"after {1 + max_node_losses} losses of a decode node that"):
                await first
        assert_idle(nodes)


async def test_the_last_node_lost_may_have_ended_though_the_router_has_not_heard_of_it() -> None:
    """Nothing more is placed meanwhile."""
    async with cluster(num_decode_nodes=2, max_node_losses=0, local_prefill_max_tokens=64) as nodes:
        async with aclosing(nodes.relay.run(a_request())) as events:
            first = asyncio.create_task(take(events))
            node = await next_decode(nodes)
            wire_id = (await node.admit()).request_id
            run = nodes.relay._running["r"]
            run._groups[0].backoff = Backoff(first=60.0)
            node.failed(wire_id, UnavailableError("the engine has crashed"))
            await until(lambda: run._groups[0].wait is not None)
            await node.stop()
            await node.start_again(epoch=2)
            with pytest.raises(GivenUpError):
                await first


async def test_a_request_that_has_lost_too_many_nodes_goes_on_when_one_of_them_has_not_ended() -> None:
    async with cluster(num_decode_nodes=3, max_node_losses=1, local_prefill_max_tokens=64) as nodes:
        async with aclosing(nodes.relay.run(a_request())) as events:
            first = asyncio.create_task(take(events))
            lost = await lose_decode_nodes(nodes, 2)
            await lost[0].start_again(epoch=1)
            again = await next_decode(nodes)
            assert again not in lost, "a node that the request has not lost"
            say(again, (await again.admit()).request_id, token(7))
            assert await first == token(7)


async def test_a_request_that_has_lost_too_many_nodes_ends_when_it_has_waited_to_know() -> None:
    async with cluster(num_decode_nodes=3, max_node_losses=1, node_wait=0.2, local_prefill_max_tokens=64) as nodes:
        async with aclosing(nodes.relay.run(a_request())) as events:
            first = asyncio.create_task(take(events))
            await lose_decode_nodes(nodes, 2)
            with pytest.raises(GivenUpError, match="after 2 losses of a decode node that"):
                await first
        assert_idle(nodes)


async def test_a_router_that_stops_does_not_give_up_a_request_that_waits_to_know() -> None:
    """It is not known to have ended nodes, and its client may ask another router at once."""
    async with cluster(num_decode_nodes=3, max_node_losses=1, node_wait=60.0, local_prefill_max_tokens=64) as nodes:
        async with aclosing(nodes.relay.run(a_request())) as events:
            first = asyncio.create_task(take(events))
            await lose_decode_nodes(nodes, 2)
            closing = asyncio.create_task(nodes.relay.close(timeout=60.0))
            with pytest.raises(UnavailableError, match="the router is stopping"):
                await first
        await closing
        assert_idle(nodes)


@pytest.mark.parametrize("end", [ScriptedDecode.end_stream, ScriptedDecode.end_watch])
async def test_nodes_that_drain_are_not_ended_by_the_request(end: Callable[[ScriptedDecode], None]) -> None:
    """However the router learns that they have drained for as long as they may."""
    async with (
        cluster(num_decode_nodes=3, max_node_losses=0, local_prefill_max_tokens=64) as nodes,
        aclosing(nodes.relay.run(a_request())) as events,
    ):
        first = asyncio.create_task(take(events))
        for _ in range(2):
            node = await next_decode(nodes)
            await node.admit()
            await drains(nodes, node)
            end(node)
        node = await next_decode(nodes)
        say(node, (await node.admit()).request_id, token(7))
        assert await first == token(7)


def crash(node: ScriptedDecode, request_id: str) -> None:
    node.failed(request_id, UnavailableError("it has crashed"))


def break_off(node: ScriptedDecode, request_id: str) -> None:
    node.end_stream()


@pytest.mark.parametrize("end", [crash, break_off])
async def test_a_node_is_heard_to_drain_only_after_a_request_is_lost_there(
    end: Callable[[ScriptedDecode, str], None],
) -> None:
    """The two come over different streams."""
    async with (
        cluster(num_decode_nodes=3, max_node_losses=0, local_prefill_max_tokens=64) as nodes,
        aclosing(nodes.relay.run(a_request())) as events,
    ):
        first = asyncio.create_task(take(events))
        for _ in range(2):
            node = await next_decode(nodes)
            wire_id = (await node.admit()).request_id
            run = nodes.relay._running["r"]
            run._groups[0].backoff = Backoff(first=60.0)
            end(node, wire_id)
            await until(lambda run=run: run._groups[0].wait is not None)  # type: ignore[misc]
            await drains(nodes, node)
            run.on_decode_node_live()
        node = await next_decode(nodes)
        say(node, (await node.admit()).request_id, token(7))
        assert await first == token(7)


async def test_a_node_that_has_not_taken_the_request_cannot_have_been_ended_by_it() -> None:
    """So there is nothing to wait for: the request goes on elsewhere at once."""
    async with (
        cluster(num_prefill_nodes=2, num_decode_nodes=2, max_node_losses=0) as nodes,
        aclosing(nodes.relay.run(a_request())) as events,
    ):
        first = asyncio.create_task(take(events))
        node = await next_decode(nodes)
        wire_id = (await node.admit()).request_id
        nodes.relay._running["r"]._groups[0].backoff = Backoff(first=60.0)
        node.failed(wire_id, NotTakenError("it is another process"))
        await next_prefill(nodes)
        other = await next_decode(nodes)
        await other.admit()
        (await next_prefill(nodes)).end(NotTakenError("it is another process"))
        await other.aborted()
        await other.admit()
        (await next_prefill(nodes)).finish(token(7, finish=FinishReason.STOP))
        assert await first == token(7, finish=FinishReason.STOP)
        assert (await take_trace(events)).num_migrations == 2


async def test_nodes_that_drain_again_and_again_are_not_ended_by_the_request() -> None:
    """Of the processes at an address, only the last one is known to have drained."""
    async with (
        cluster(num_decode_nodes=2, max_node_losses=0, local_prefill_max_tokens=64) as nodes,
        aclosing(nodes.relay.run(a_request())) as events,
    ):
        first = asyncio.create_task(take(events))
        for number in range(4):
            node = await next_decode(nodes)
            await node.admit()
            await drains(nodes, node)
            await ended(nodes, node)
            await node.start_again(epoch=2 + number)
            handle = nodes.registry.decode[nodes.decodes.index(node)]
            await until(lambda handle=handle: handle.state is NodeState.LIVE)  # type: ignore[misc]
        node = await next_decode(nodes)
        say(node, (await node.admit()).request_id, token(7))
        assert await first == token(7)


async def test_a_prefill_node_that_drains_and_is_lost_before_its_stream_ends_is_not_ended_by_the_request() -> None:
    """A node that closes ends its Watch stream first."""
    async with (
        cluster(num_prefill_nodes=2, max_node_losses=0) as nodes,
        aclosing(nodes.relay.run(a_request())) as events,
    ):
        first = asyncio.create_task(take(events))
        call = await soon(nodes.prefill.calls)
        await nodes.decode.admit()
        await drains(nodes, nodes.prefill)
        nodes.prefill.end_watch()
        await nodes.decode.aborted()
        assert not (await nodes.decode.admit()).local_prefill
        (await soon(nodes.prefills[1].calls)).finish(token(7, finish=FinishReason.STOP))
        assert await first == token(7, finish=FinishReason.STOP)
        await call.over.wait()
        assert nodes.registry.prefill[0].state is NodeState.LOST


async def test_a_client_that_reads_on_late_meets_the_loss_of_the_process_that_drained() -> None:
    """Another one is live at its address by then, which neither has drained nor is to blame."""
    async with (
        cluster(num_decode_nodes=2, max_node_losses=0, local_prefill_max_tokens=64) as nodes,
        aclosing(nodes.relay.run(a_request())) as events,
    ):
        first = asyncio.create_task(take(events))
        node = await next_decode(nodes)
        say(node, (await node.admit()).request_id, token(7))
        assert await first == token(7)
        await drains(nodes, node)
        await ended(nodes, node)
        await node.start_again(epoch=2)
        handle = nodes.registry.decode[nodes.decodes.index(node)]
        await until(lambda: handle.state is NodeState.LIVE)
        for _ in range(4):
            handle.outlier.failed(UnavailableError("the engine has crashed"))
        following = asyncio.create_task(take(events))
        again = await next_decode(nodes)
        assert not handle.outlier.is_ejected
        say(again, (await again.admit()).request_id, token(8))
        assert await following == token(8)


async def test_outputs_that_run_apart_lose_nodes_each_on_its_own() -> None:
    async with cluster(num_prefill_nodes=0, num_decode_nodes=4, max_node_losses=2) as nodes:
        async with aclosing(nodes.relay.run(a_request(n=2))) as events:
            first = asyncio.create_task(take(events))
            node = await next_decode(nodes)
            say(node, (await node.admit()).request_id, token(7), token(8, index=1))
            assert [await first, await take(events)] == [token(7), token(8, index=1)]
            next_event = asyncio.create_task(take(events))
            await ended(nodes, node)
            _, last, *apart = nodes.decodes
            assert [(await each.admit()).first_choice_index for each in apart] == [0, 1]
            for each in apart:
                await ended(nodes, each)
            assert [(await last.admit()).first_choice_index for _ in apart] == [0, 1]
            await give_up(next_event)


async def test_a_new_token_starts_the_count_of_losses_again() -> None:
    async with (
        cluster(max_node_losses=1, local_prefill_max_tokens=64) as nodes,
        aclosing(nodes.relay.run(a_request())) as events,
    ):
        for number in range(3):
            next_event = asyncio.create_task(take(events))
            wire_id = (await nodes.decode.admit()).request_id
            say(nodes.decode, wire_id, token(7 + number))
            assert await next_event == token(7 + number)
            nodes.decode.failed(wire_id, UnavailableError("the engine has crashed"))


async def test_nodes_that_end_after_a_token_each_are_not_counted_together() -> None:
    """A long request may meet more of them than it may lose in a row."""
    async with (
        cluster(num_prefill_nodes=0, num_decode_nodes=3, max_node_losses=1) as nodes,
        aclosing(nodes.relay.run(a_request())) as events,
    ):
        last = token(9, finish=FinishReason.STOP)
        for output in (token(7), token(8), last):
            next_event = asyncio.create_task(take(events))
            node = await next_decode(nodes)
            say(node, (await node.admit()).request_id, output)
            assert await next_event == output
            if output is not last:
                await ended(nodes, node)
                await node.start_again(epoch=2)
        assert (await take_trace(events)).num_migrations == 2


async def test_a_request_that_no_decode_node_survives_ends_though_each_prefill_node_adds_a_token() -> None:
    async with (
        cluster(num_decode_nodes=3, max_node_losses=1) as nodes,
        aclosing(nodes.relay.run(a_request())) as events,
    ):
        for number in range(2):
            next_event = asyncio.create_task(take(events))
            node = await next_decode(nodes)
            await node.admit()
            (await soon(nodes.prefill.calls)).finish(token(7 + number))
            assert await next_event == token(7 + number)
            await node.started()
            await ended(nodes, node)
            await node.start_again(epoch=2)
        with pytest.raises(GivenUpError, match="after 2 losses of a decode node that had the first token"):
            await take(events)
        assert_idle(nodes)


async def test_a_node_that_has_not_ended_is_not_lost_however_often_its_stream_breaks() -> None:
    async with cluster(max_node_losses=1) as nodes, aclosing(nodes.relay.run(a_request())) as events:
        for number in range(3):
            next_event = asyncio.create_task(take(events))
            await nodes.decode.admit()
            (await soon(nodes.prefill.calls)).finish(token(7 + number))
            assert await next_event == token(7 + number)
            await nodes.decode.started()
            nodes.decode.end_stream()
        await give_up(asyncio.create_task(take(events)))


async def test_losses_at_different_points_are_no_sign_that_a_request_ends_nodes() -> None:
    async with cluster(num_prefill_nodes=2, num_decode_nodes=4, max_node_losses=1) as nodes:
        async with aclosing(nodes.relay.run(a_request())) as events:
            next_event = asyncio.create_task(take(events))
            node = await next_decode(nodes)
            await node.admit()
            (await next_prefill(nodes)).end(UnavailableError("crashed"))
            await node.aborted()
            node = await next_decode(nodes)
            await node.admit()
            await next_prefill(nodes)
            node.end_stream()
            for answer in (token(7), token(8, finish=FinishReason.STOP)):
                node = await next_decode(nodes)
                await node.admit()
                (await next_prefill(nodes)).finish(answer)
                assert await next_event == answer
                if answer.finish_reason is None:
                    await node.started()
                    next_event = asyncio.create_task(take(events))
                    node.end_stream()
            assert (await take_trace(events)).num_migrations == 3
