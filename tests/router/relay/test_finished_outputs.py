"""Outputs of which the client needs no more, such as those that a stop string has ended, while it waits for others."""

import asyncio
from contextlib import aclosing

from kvrelay.core.generation.outputs import FinishReason, TokenOutput
from tests.router.routed import a_request, opened, take, take_trace
from tests.router.scripted_cluster import cluster
from tests.router.scripted_nodes import token


async def test_a_node_ends_an_output_of_which_the_client_needs_no_more_while_it_waits_for_another() -> None:
    request = a_request(n=2)
    async with cluster(local_prefill_max_tokens=64) as nodes, aclosing(nodes.relay.run(request)) as events:
        first = asyncio.create_task(take(events))
        wire_id = (await nodes.decode.admit()).request_id
        nodes.decode.tokens(wire_id, token(7))
        assert await first == token(7)
        nodes.relay.finish(request.request_id, 0)
        second = asyncio.create_task(take(events))
        assert await nodes.decode.told_to_finish() == (wire_id, 0)
        nodes.decode.tokens(wire_id, token(8))  # it was under way
        nodes.decode.tokens(wire_id, TokenOutput(0, (), finish_reason=FinishReason.ABORT))
        nodes.decode.tokens(wire_id, token(17, index=1, finish=FinishReason.LENGTH))
        assert await second == token(17, index=1, finish=FinishReason.LENGTH)
        await take_trace(events)
        assert nodes.decode.commands.empty(), "it is told once, and has nothing left to abort"


async def test_an_output_that_needs_no_second_token_is_ended_when_the_decode_node_has_begun_it() -> None:
    request = a_request(n=2)
    async with cluster() as nodes, aclosing(nodes.relay.run(request)) as events:
        first, call, wire_id = await opened(nodes, events)
        call.finish(token(7), token(17, index=1))
        assert await first == token(7)
        assert await take(events) == token(17, index=1)
        await nodes.decode.started()
        nodes.relay.finish(request.request_id, 0)
        nodes.decode.kv_ready(wire_id, fetched=10)
        nodes.decode.tokens(wire_id, token(8))
        nodes.decode.tokens(wire_id, token(18, index=1))
        assert await take(events) == token(18, index=1)
        assert await nodes.decode.told_to_finish() == (wire_id, 0)
        nodes.relay.finish(request.request_id, 1)
        await take_trace(events)
        assert await nodes.decode.aborted() == wire_id
