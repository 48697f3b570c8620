"""The end of the relay and of a request: who is waited for, who is told, and that nothing is left."""

import asyncio
import logging
import weakref
from contextlib import suppress

import grpc
import pytest

from kvrelay.core.errors import KVRelayError, UnavailableError
from kvrelay.core.generation.outputs import FinishReason, TokenOutput
from tests.router.routed import a_request, assert_idle, begun, collected, expire, give_up, opened, take, take_trace
from tests.router.scripted_cluster import cluster
from tests.router.scripted_nodes import soon, token, until


async def test_the_log_says_what_a_request_waited_for_that_is_closed_when_its_time_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The deadline of a gRPC call closes it, mostly just before the request's own deadline."""
    caplog.set_level(logging.INFO)
    message = "the request took longer than 60 seconds; it waited for prefill node prefill-0 to prefill"
    for seconds, is_late in ((50.0, False), (59.5, True)):
        async with cluster() as nodes:
            first, _, wire_id = await opened(nodes, nodes.relay.run(a_request()))
            [run] = nodes.relay._running.values()
            run._began_at -= seconds
            await give_up(first)
            assert (f"request {wire_id}: {message}" in caplog.text) is is_late
            assert_idle(nodes)


async def test_closing_the_relay_fails_what_still_runs() -> None:
    async with cluster() as nodes:
        first, call, wire_id = await opened(nodes, nodes.relay.run(a_request()))
        call.publish(1)
        await nodes.decode.pull()  # so that the lease is known
        await nodes.relay.close(timeout=0.0)
        assert nodes.prefill.released.get_nowait() == "lease", "the process may end now"
        left = {task.get_name() for task in asyncio.all_tasks()}
        assert not [name for name in left if name.startswith(("lease ", "stream "))]
        with pytest.raises(UnavailableError, match="stopping"):
            await first
        with pytest.raises(UnavailableError, match="stopping"):
            nodes.relay.served_model()
        with pytest.raises(UnavailableError, match="stopping"):
            await anext(nodes.relay.run(a_request()))
        assert_idle(nodes)
        assert wire_id.startswith("r.")


async def test_closing_the_relay_waits_for_the_last_request() -> None:
    async with cluster(local_prefill_max_tokens=64) as nodes:
        running = [asyncio.create_task(collected(nodes, a_request(f"r{number}"))) for number in range(2)]
        short, long = [(await nodes.decode.admit()).request_id for _ in running]
        nodes.decode.tokens(short, token(7, finish=FinishReason.STOP))
        await running[0]
        closing = asyncio.create_task(nodes.relay.close(timeout=60.0))
        nodes.decode.tokens(long, token(8))
        nodes.decode.tokens(long, token(9, finish=FinishReason.STOP))
        assert [event for event in await running[1] if isinstance(event, TokenOutput)][1].token_ids == (9,)
        await closing


async def test_closing_a_relay_that_has_had_no_request_waits_for_nothing() -> None:
    async with cluster() as nodes, asyncio.timeout(10):
        await nodes.relay.close(timeout=60.0)


async def test_a_request_that_has_ended_is_forgotten(without_collections: None) -> None:
    """Nothing that outlives it may keep its tokens: neither the timer of its deadline nor a node's client. Nor may it
    keep itself: between two full collections of garbage a router may serve a thousand long prompts."""
    async with cluster() as nodes:
        events = nodes.relay.run(a_request(timeout=600.0))
        first, call, _ = await opened(nodes, events)
        forgotten = weakref.ref(nodes.relay._running["r"])
        call.finish(token(7, finish=FinishReason.LENGTH))
        call.end()
        await first
        await take_trace(events)
        del events, first
        await soon(nodes.prefill.released)
        await until(lambda: forgotten() is None)


async def test_an_attempt_that_has_ended_is_forgotten(without_collections: None) -> None:
    async with cluster(local_prefill_max_tokens=64) as nodes:
        running = asyncio.create_task(collected(nodes, a_request()))
        wire_id = (await nodes.decode.admit()).request_id
        forgotten = weakref.ref(nodes.relay._running["r"]._groups[0].attempt)
        nodes.decode.tokens(wire_id, token(7))
        nodes.decode.tokens(wire_id, token(8, finish=FinishReason.LENGTH))
        await running
        await until(lambda: forgotten() is None)


async def test_an_attempt_that_has_lost_its_node_is_forgotten_while_the_request_goes_on(
    without_collections: None,
) -> None:
    """The request keeps the error, for its message should no other node come."""
    async with cluster(num_decode_nodes=2, local_prefill_max_tokens=64) as nodes:
        running = asyncio.create_task(collected(nodes, a_request()))
        wire_id = (await nodes.decode.admit()).request_id
        forgotten = weakref.ref(nodes.relay._running["r"]._groups[0].attempt)
        nodes.decode.failed(wire_id, UnavailableError("the engine has crashed"))
        wire_id = (await nodes.decodes[1].admit()).request_id
        await until(lambda: forgotten() is None)
        nodes.decodes[1].tokens(wire_id, token(7, finish=FinishReason.LENGTH))
        await running


async def test_a_request_whose_client_leaves_tokens_unread_is_forgotten(without_collections: None) -> None:
    async with cluster() as nodes:
        events = nodes.relay.run(a_request())
        _, wire_id = await begun(nodes, events, token(7))
        forgotten = weakref.ref(nodes.relay._running["r"])
        nodes.decode.tokens(wire_id, token(8))
        await until(lambda: not nodes.relay._running["r"]._inbox.empty())
        await events.aclose()
        del events
        await until(lambda: forgotten() is None)


@pytest.mark.parametrize("how", ["aborted", "expired", "failed"])
async def test_a_request_that_has_ended_with_an_error_is_forgotten(how: str, without_collections: None) -> None:
    """The error comes with the frames that it has passed, which must not refer to it."""
    async with cluster() as nodes:
        events = nodes.relay.run(a_request())
        _, wire_id = await begun(nodes, events, token(7))
        forgotten = weakref.ref(nodes.relay._running["r"])
        match how:
            case "aborted":
                nodes.relay.abort("r")
            case "expired":
                expire(nodes)
            case _:
                nodes.decode.failed(wire_id, KVRelayError("broken"))
        with suppress(KVRelayError):
            await take(events)
        del events
        await until(lambda: forgotten() is None)


async def test_a_node_to_which_no_stream_can_be_opened_keeps_no_count_of_the_request() -> None:
    """Otherwise it would count as busier with each such request, for as long as the router lives."""
    async with cluster() as nodes:
        [decode] = nodes.registry.decode
        await decode.channel.close()
        with pytest.raises(grpc.aio.UsageError):
            await collected(nodes, a_request())
        assert_idle(nodes)
