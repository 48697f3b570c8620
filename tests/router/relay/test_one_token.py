"""Outputs that end with their first token, as those that rate a prompt: a prefill node serves them alone."""

import asyncio
from contextlib import aclosing
from dataclasses import replace

from kvrelay.core.errors import UnavailableError
from kvrelay.core.generation.outputs import FinishReason
from router.request import RoutedRequest
from tests.router.routed import a_request, assert_idle, give_up, take, take_trace
from tests.router.scripted_cluster import cluster
from tests.router.scripted_nodes import soon, token


def one_token_request(*, n: int = 1) -> RoutedRequest:
    request = a_request(n=n)
    return replace(request, sampling=replace(request.sampling, max_tokens=1))


async def test_the_decode_node_hears_nothing_of_outputs_that_end_with_their_first_token() -> None:
    async with cluster() as nodes, aclosing(nodes.relay.run(one_token_request(n=2))) as events:
        first = asyncio.create_task(take(events))
        call = await soon(nodes.prefill.calls)
        decode = nodes.registry.decode[0]
        assert (decode.num_sequences, decode.num_claimed_blocks) == (0, 0)
        call.accept()
        call.publish(3)
        last_tokens = [token(7, finish=FinishReason.LENGTH), token(17, index=1, finish=FinishReason.LENGTH)]
        call.finish(*last_tokens)
        assert [await first, await take(events)] == last_tokens
        trace = await take_trace(events)
        assert (trace.prefill_node, trace.num_transferred_blocks) == ("prefill-0", 0)
        assert await soon(nodes.prefill.released) == "lease"
        assert (nodes.decode.num_streams, nodes.decode.commands.qsize()) == (0, 0)
        assert_idle(nodes)


async def test_a_decode_node_on_probation_is_not_tried_by_a_request_that_it_hears_nothing_of() -> None:
    async with cluster() as nodes, aclosing(nodes.relay.run(one_token_request())) as events:
        decode = nodes.registry.decode[0]
        decode.outlier._num_failures = 5
        assert decode.outlier.is_on_probation
        first = asyncio.create_task(take(events))
        await soon(nodes.prefill.calls)
        assert decode.outlier.admits
        await give_up(first)


async def test_a_decode_node_that_prefills_by_itself_serves_such_outputs() -> None:
    async with cluster(local_prefill_max_tokens=64) as nodes, aclosing(nodes.relay.run(one_token_request())) as events:
        first = asyncio.create_task(take(events))
        admit = await nodes.decode.admit()
        assert admit.local_prefill
        nodes.decode.tokens(admit.request_id, token(7, finish=FinishReason.LENGTH))
        assert await first == token(7, finish=FinishReason.LENGTH)
        await take_trace(events)


async def test_such_outputs_go_on_at_another_prefill_node_if_theirs_is_lost() -> None:
    last_token = token(7, finish=FinishReason.LENGTH)
    async with cluster(num_prefill_nodes=2) as nodes, aclosing(nodes.relay.run(one_token_request())) as events:
        first = asyncio.create_task(take(events))
        (await soon(nodes.prefill.calls)).end(UnavailableError("gone"))
        (await soon(nodes.prefills[1].calls)).finish(last_token)
        assert await first == last_token
        assert (await take_trace(events)).num_migrations == 1
        assert nodes.decode.num_streams == 0


async def test_the_last_token_of_an_output_that_lost_its_node_needs_no_decode_node() -> None:
    last_token = token(12, finish=FinishReason.LENGTH)
    request = a_request()
    request = replace(request, sampling=replace(request.sampling, max_tokens=2))
    async with cluster(num_decode_nodes=2) as nodes, aclosing(nodes.relay.run(request)) as events:
        first = asyncio.create_task(take(events))
        call = await soon(nodes.prefill.calls)
        call.accept()
        call.finish(token(7))
        assert await first == token(7)
        second = asyncio.create_task(take(events))
        await nodes.decode.stop()
        (await soon(nodes.prefill.calls)).finish(last_token)
        assert await second == last_token
        await take_trace(events)
        assert nodes.decodes[1].num_streams == 0


async def test_a_prefill_node_that_does_not_end_such_an_output_is_lost() -> None:
    """Nobody would decode it."""
    last_token = token(7, finish=FinishReason.LENGTH)
    async with cluster(num_prefill_nodes=2) as nodes, aclosing(nodes.relay.run(one_token_request())) as events:
        first = asyncio.create_task(take(events))
        (await soon(nodes.prefill.calls)).finish(token(7))
        (await soon(nodes.prefills[1].calls)).finish(last_token)
        assert await first == last_token
        await take_trace(events)
