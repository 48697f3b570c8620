"""The life of a request: order, failures, and that nothing is left. The test decides each answer of the nodes."""

import asyncio
import logging
from contextlib import aclosing

import pytest

from kvrelay.core.backoff import Backoff
from kvrelay.core.errors import (
    CancelledByPeerError,
    DeadlineError,
    InvalidRequestError,
    KVRelayError,
    OverloadedError,
    UnavailableError,
)
from kvrelay.core.generation.outputs import FinishReason, TokenOutput
from kvrelay.core.generation.prompt_logprobs import PromptLogprobs
from kvrelay.core.kv.source import KVSource
from kvrelay.core.node_report import NOTHING_FETCHED
from kvrelay.v1 import decode_node_pb2
from router.relay.loss import Loss
from router.relay.output_group import OutputGroup
from router.relay.prefill_client import PrefillEnded, PrefillFinished, PrefillProgress
from tests.router.routed import a_request, assert_idle, begun, expire, give_up, opened, take, take_trace
from tests.router.scripted_cluster import cluster
from tests.router.scripted_nodes import soon, token, until


async def test_tokens_come_before_the_transfer_and_the_lease_goes_after_it() -> None:
    async with cluster() as nodes, aclosing(nodes.relay.run(a_request())) as events:
        first, call, wire_id = await opened(nodes, events)
        call.publish(1)
        pull = await nodes.decode.pull()
        assert (pull.num_blocks, pull.ended) == (1, False)
        assert (pull.source.node_id, pull.source.epoch, pull.source.endpoint) == ("prefill-0", 1, "endpoint-prefill-0")
        call.finish(token(7), num_cached_tokens=4)
        assert await first == token(7)  # D has neither all blocks nor a word said
        start = await nodes.decode.started()
        assert [tuple(output.token_ids) for output in start.first_tokens] == [(7,)]

        second = asyncio.create_task(take(events))
        call.publish(3)
        assert (await nodes.decode.pull()).num_blocks == 3
        call.end()
        pull = await nodes.decode.pull()
        assert (pull.num_blocks, pull.ended) == (3, True)
        assert nodes.prefill.released.empty()
        nodes.decode.admitted(wire_id)
        nodes.decode.kv_ready(wire_id, fetched=10)
        assert await soon(nodes.prefill.released) == "lease"
        nodes.decode.tokens(wire_id, token(8))
        assert await second == token(8)
        nodes.decode.tokens(wire_id, token(9, finish=FinishReason.LENGTH))
        assert await take(events) == token(9, finish=FinishReason.LENGTH)
        trace = await take_trace(events)
        assert (trace.prefill_node, trace.decode_node) == ("prefill-0", "decode-0")
        assert (trace.num_prompt_blocks, trace.num_computed_tokens, trace.num_cached_tokens) == (3, 6, 4)
        assert trace.num_transferred_blocks == 3
        assert 0 <= trace.queue_seconds <= trace.ttft_seconds <= trace.e2e_seconds
        assert 0 < trace.handover_seconds <= trace.e2e_seconds - trace.ttft_seconds
        assert nodes.decode.commands.empty() and nodes.prefill.released.empty()
        assert_idle(nodes)


async def test_outputs_that_all_end_with_their_first_token_never_start_decoding() -> None:
    async with cluster() as nodes, aclosing(nodes.relay.run(a_request())) as events:
        first, call, wire_id = await opened(nodes, events)
        call.finish(token(7, finish=FinishReason.LENGTH))
        assert await first == token(7, finish=FinishReason.LENGTH)
        await take_trace(events)
        assert await nodes.decode.aborted() == wire_id
        assert await soon(nodes.prefill.released) == "lease"


async def test_choices_interleave_under_their_index() -> None:
    async with cluster() as nodes, aclosing(nodes.relay.run(a_request(n=2))) as events:
        first, call, wire_id = await opened(nodes, events)
        call.finish(token(7, finish=FinishReason.STOP), token(17, index=1))
        assert await first == token(7, finish=FinishReason.STOP)
        assert await take(events) == token(17, index=1)
        await nodes.decode.started()
        nodes.decode.kv_ready(wire_id, fetched=10)
        nodes.decode.tokens(wire_id, token(8))  # of an output that is over: not passed on
        nodes.decode.tokens(wire_id, token(18, index=1, finish=FinishReason.LENGTH))
        assert await take(events) == token(18, index=1, finish=FinishReason.LENGTH)
        await take_trace(events)


async def test_an_output_that_has_ended_does_not_hide_one_that_goes_on() -> None:
    """The node is told to abort the one that the client leaves."""
    async with cluster(local_prefill_max_tokens=64) as nodes:
        events = nodes.relay.run(a_request(n=2))
        first = asyncio.create_task(take(events))
        wire_id = (await nodes.decode.admit()).request_id
        nodes.decode.tokens(wire_id, token(7, finish=FinishReason.STOP))
        assert await first == token(7, finish=FinishReason.STOP)
        await events.aclose()
        assert await nodes.decode.aborted() == wire_id


async def test_a_lease_is_kept_until_the_first_token_though_the_decode_node_needs_no_block() -> None:
    async with cluster() as nodes, aclosing(nodes.relay.run(a_request())) as events:
        first, call, wire_id = await opened(nodes, events)
        nodes.decode.kv_ready(wire_id, fetched=0)
        nodes.decode.kv_missing(wire_id, 5)  # only to see that what came before it was taken
        assert (await nodes.decode.pull()).final
        call.finish(token(7, finish=FinishReason.STOP))
        await first
        assert nodes.prefill.released.empty()
        await take_trace(events)
        assert await soon(nodes.prefill.released) == "lease"


async def test_closing_aborts_both_legs() -> None:
    async with cluster() as nodes:
        events = nodes.relay.run(a_request())
        first, call, wire_id = await opened(nodes, events)
        call.finish(token(7))
        await first
        await events.aclose()
        await nodes.decode.started()
        assert await nodes.decode.aborted() == wire_id
        assert await soon(nodes.prefill.released) == "lease"
        await call.over.wait()
        assert_idle(nodes)


async def test_cancelling_the_consumer_before_the_first_token_aborts_both_legs() -> None:
    async with cluster() as nodes, aclosing(nodes.relay.run(a_request())) as events:
        first, call, wire_id = await opened(nodes, events)
        call.publish(1)
        await nodes.decode.pull()  # so that the lease is known
        await give_up(first)
        assert await nodes.decode.aborted() == wire_id
        assert await soon(nodes.prefill.released) == "lease"
        await call.over.wait()
        assert_idle(nodes)


async def test_a_lease_is_released_though_the_stream_by_which_it_came_is_broken() -> None:
    async with cluster() as nodes:
        events = nodes.relay.run(a_request())
        first, call, _ = await opened(nodes, events)
        call.finish(token(7))
        await first
        [client] = nodes.placer._prefill_clients.values()
        stream = client._stream
        nodes.prefill.end_streams()
        await until(lambda: stream is not None and stream.broken)
        await events.aclose()
        assert await soon(nodes.prefill.released) == "lease"


async def test_a_prefill_that_fails_before_its_first_token_moves_to_the_decode_node() -> None:
    async with cluster() as nodes, aclosing(nodes.relay.run(a_request())) as events:
        first, call, wire_id = await opened(nodes, events)
        call.publish(1)
        await nodes.decode.pull()
        call.end(UnavailableError("out of luck"))
        assert await nodes.decode.aborted() == wire_id
        admit = await nodes.decode.admit()
        assert admit.local_prefill and admit.request_id != wire_id
        assert await soon(nodes.prefill.released) == "lease"
        nodes.decode.tokens(wire_id, token(1))  # late, of the attempt that was given up
        nodes.decode.prompt_computed(admit.request_id, 4)
        nodes.decode.tokens(admit.request_id, token(7))
        assert await first == token(7)
        nodes.decode.tokens(admit.request_id, token(8, finish=FinishReason.STOP))
        await take(events)
        trace = await take_trace(events)
        assert (trace.prefill_node, trace.num_cached_tokens) == (None, 0), "the request has had computed what D holds"
        assert_idle(nodes)


async def test_a_prefill_node_that_dies_before_its_first_token_is_not_missed() -> None:
    async with cluster() as nodes, aclosing(nodes.relay.run(a_request())) as events:
        first, _, wire_id = await opened(nodes, events)
        await nodes.prefill.stop()
        assert await nodes.decode.aborted() == wire_id
        admit = await nodes.decode.admit()
        assert admit.local_prefill
        nodes.decode.tokens(admit.request_id, token(7, finish=FinishReason.STOP))
        assert await first == token(7, finish=FinishReason.STOP)
        await take_trace(events)


async def test_a_prefill_that_fails_after_its_first_token_leaves_the_rest_to_the_decode_node() -> None:
    async with cluster() as nodes, aclosing(nodes.relay.run(a_request())) as events:
        first, call, wire_id = await opened(nodes, events)
        call.publish(2)
        assert not (await nodes.decode.pull()).ended
        call.finish(token(7))
        await first
        await nodes.decode.started()
        call.end(UnavailableError("died"))
        second = asyncio.create_task(take(events))
        pull = await nodes.decode.pull()
        assert (pull.num_blocks, pull.ended) == (2, True)
        nodes.decode.kv_ready(wire_id, fetched=8, recomputed=2)
        nodes.decode.tokens(wire_id, token(8, finish=FinishReason.STOP))
        assert await second == token(8, finish=FinishReason.STOP)
        trace = await take_trace(events)
        assert (trace.num_computed_tokens, trace.num_transferred_blocks) == (10, 2)


@pytest.mark.parametrize("error", [InvalidRequestError("too long", field="prompt"), DeadlineError("too long")])
async def test_a_failure_that_another_prefill_node_would_repeat_is_not_tried_elsewhere(error: KVRelayError) -> None:
    async with cluster() as nodes, aclosing(nodes.relay.run(a_request())) as events:
        first, call, wire_id = await opened(nodes, events)
        call.end(error)
        with pytest.raises(type(error), match="too long"):
            await first
        assert await nodes.decode.aborted() == wire_id
        assert_idle(nodes)


async def test_first_tokens_of_the_wrong_outputs_are_a_failed_prefill() -> None:
    async with cluster() as nodes, aclosing(nodes.relay.run(a_request(n=2))) as events:
        first, call, _ = await opened(nodes, events)
        call.finish(token(7))
        await nodes.decode.aborted()
        assert (await nodes.decode.admit()).local_prefill
        await give_up(first)


async def test_what_a_given_up_prefill_still_had_to_say_is_ignored() -> None:
    async with cluster() as nodes, aclosing(nodes.relay.run(a_request(n=2))) as events:
        first, call, _ = await opened(nodes, events)
        supervisor = nodes.relay._running["r"]
        [group] = supervisor._groups
        assert group.attempt is not None
        finished = PrefillFinished((token(7),), PromptLogprobs(), 0, NOTHING_FETCHED)
        for message in (finished, PrefillProgress(3), PrefillEnded(None)):
            group.attempt._sink(message)
        await nodes.decode.aborted()
        admit = await nodes.decode.admit()
        assert admit.local_prefill
        nodes.decode.tokens(admit.request_id, token(8))
        assert await first == token(8)
        await call.over.wait()


async def test_a_failure_at_the_decode_node_keeps_its_class() -> None:
    async with cluster() as nodes, aclosing(nodes.relay.run(a_request())) as events:
        first, call, wire_id = await opened(nodes, events)
        nodes.decode.failed(wire_id, OverloadedError("no room"))
        with pytest.raises(OverloadedError, match="no room"):
            await first
        await call.over.wait()
        assert nodes.decode.commands.empty()  # it knows already


async def test_a_decode_node_of_a_newer_protocol_is_understood_as_far_as_possible() -> None:
    async with cluster() as nodes, aclosing(nodes.relay.run(a_request())) as events:
        first, _, wire_id = await opened(nodes, events)
        nodes.decode.send(decode_node_pb2.DecodeEvent(request_id=wire_id))  # a kind that is not known here
        nodes.decode.failed(wire_id, InvalidRequestError("no", field="n"))
        with pytest.raises(InvalidRequestError) as refused:
            await first
        assert refused.value.field == "n"


async def test_the_deadline_of_a_request_ends_both_legs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with cluster() as nodes, aclosing(nodes.relay.run(a_request())) as events:
        first, call, wire_id = await opened(nodes, events)
        call.publish(1)
        await nodes.decode.pull()  # so that the lease is known
        expire(nodes)
        message = "the request took longer than 60 seconds; it waited for prefill node prefill-0 to prefill"
        with pytest.raises(DeadlineError, match=message):
            await first
        assert f"request {wire_id}: {message}" in caplog.text
        assert f"request {wire_id}: placed at prefill-0 and decode-0" in caplog.text
        assert await nodes.decode.aborted() == wire_id
        assert await soon(nodes.prefill.released) == "lease"
        await call.over.wait()


async def test_a_deadline_names_the_decode_node_that_was_waited_for() -> None:
    async with cluster() as nodes, aclosing(nodes.relay.run(a_request())) as events:
        _, wire_id = await begun(nodes, events, token(7))
        nodes.decode.tokens(wire_id, token(8))
        assert await take(events) == token(8)
        last = asyncio.create_task(take(events))
        [run] = nodes.relay._running.values()
        await until(run._inbox.empty)  # what the nodes have sent so far is handled
        expire(nodes)
        with pytest.raises(DeadlineError, match="it waited for decode node decode-0 to go on"):
            await last
    async with cluster(local_prefill_max_tokens=64) as nodes, aclosing(nodes.relay.run(a_request())) as events:
        first = asyncio.create_task(take(events))
        await nodes.decode.admit()
        expire(nodes)
        with pytest.raises(DeadlineError, match="it waited for decode node decode-0 to begin"):
            await first


async def test_abort_ends_the_request_for_its_consumer() -> None:
    async with cluster() as nodes, aclosing(nodes.relay.run(a_request())) as events:
        first, _, wire_id = await opened(nodes, events)
        nodes.relay.abort("unknown")
        nodes.relay.abort("r")
        with pytest.raises(CancelledByPeerError):
            await first
        assert await nodes.decode.aborted() == wire_id


async def test_a_lease_is_renewed_while_the_decode_node_is_slow() -> None:
    async with cluster(lease_ttl=0.15) as nodes, aclosing(nodes.relay.run(a_request())) as events:
        first, call, wire_id = await opened(nodes, events)
        call.finish(token(7))
        await first
        assert call.request.lease_ttl_ms == 150
        for _ in range(3):
            assert await soon(nodes.prefill.renewed) == ("lease",)
        second = asyncio.create_task(take(events))
        nodes.decode.kv_ready(wire_id, fetched=10)
        assert await soon(nodes.prefill.released) == "lease"
        nodes.decode.tokens(wire_id, token(8, finish=FinishReason.STOP))
        await second
        await take_trace(events)


async def test_a_short_prompt_is_prefilled_where_it_is_decoded() -> None:
    async with cluster(local_prefill_max_tokens=64) as nodes, aclosing(nodes.relay.run(a_request())) as events:
        first = asyncio.create_task(take(events))
        admit = await nodes.decode.admit()
        assert admit.local_prefill
        nodes.decode.tokens(admit.request_id, TokenOutput(0, (7, 8)))
        assert (await first) == TokenOutput(0, (7, 8))
        nodes.decode.tokens(admit.request_id, token(9, finish=FinishReason.LENGTH))
        assert await take(events) == token(9, finish=FinishReason.LENGTH)
        trace = await take_trace(events)
        assert trace.ttft_seconds < trace.e2e_seconds
        assert (trace.prefill_node, trace.num_computed_tokens, trace.num_transferred_blocks) == (None, 10, 0)
        assert nodes.prefill.calls.empty() and nodes.decode.commands.empty()


async def test_requests_share_one_stream_and_are_bounded_in_number() -> None:
    async with cluster(max_concurrent_requests=2) as nodes:
        running = [nodes.relay.run(a_request(f"r{number}")) for number in range(2)]
        tasks = [asyncio.create_task(take(events)) for events in running]
        admits = [await nodes.decode.admit() for _ in running]
        assert len({admit.request_id for admit in admits}) == 2
        with pytest.raises(InvalidRequestError, match="already"):
            await anext(nodes.relay.run(a_request("r1")))
        with pytest.raises(OverloadedError):
            await anext(nodes.relay.run(a_request("r2")))
        nodes.decode.failed(admits[1].request_id, KVRelayError("broken"))
        with pytest.raises(KVRelayError, match="broken"):
            await tasks[1]
        assert not tasks[0].done() and nodes.decode.num_streams == 1
        await give_up(tasks[0])


async def test_a_client_that_takes_nothing_holds_no_node_beyond_the_deadline() -> None:
    """Nobody reads the inbox then, in which the deadline is a message."""
    async with cluster() as nodes, aclosing(nodes.relay.run(a_request())) as events:
        first, call, wire_id = await opened(nodes, events)
        call.finish(token(7))
        assert await first == token(7)
        await nodes.decode.started()
        nodes.decode.tokens(wire_id, token(8))
        [run] = nodes.relay._running.values()
        await until(lambda: not run._inbox.empty())
        expire(nodes)
        assert await nodes.decode.aborted() == wire_id
        assert await soon(nodes.prefill.released) == "lease"
        assert_idle(nodes)
        with pytest.raises(DeadlineError, match="it waited for its client, or this router, to take"):
            while True:
                await take(events)


def test_a_token_of_a_decode_node_makes_the_waits_short_again() -> None:
    """A prefill node's token does not: each decode node may end before its first."""
    group = OutputGroup((0,), Backoff(first=1.0, longest=64.0, jitter=0.0))
    waits = []
    for are_first in (True, True, False, True):
        waits.append(group.backoff.next())
        group.forgive_losses(are_first=are_first)
    assert waits == [1.0, 2.0, 4.0, 1.0]


def test_a_token_forgets_the_losses_before_it() -> None:
    node = KVSource("node", 1, "")
    group = OutputGroup((0,), Backoff(), {(loss, node) for loss in Loss})
    group.forgive_losses(are_first=True)
    assert group.losses == {(Loss.DECODING, node)}
    group.forgive_losses(are_first=False)
    assert not group.losses
