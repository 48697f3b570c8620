"""A node is lost under a request: what the next nodes are told, and how often. The test decides each answer of the
nodes."""

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from kvrelay.core.errors import KVRelayError, UnavailableError
from kvrelay.core.generation.outputs import FinishReason, TokenLogprobs, TokenOutput
from kvrelay.core.generation.prompt_logprobs import PromptLogprobs
from kvrelay.core.rpc.wire import prompt_logprobs_to_wire
from kvrelay.v1 import common_pb2, decode_node_pb2, prefill_node_pb2
from router.nodes.node import NodeState
from tests.router.routed import PROMPT, a_request, assert_idle, begun, give_up, opened, say, take, take_trace
from tests.router.scripted_cluster import cluster
from tests.router.scripted_nodes import soon, token, until


async def test_a_lost_decode_node_is_replaced_by_one_that_is_given_all_tokens() -> None:
    async with cluster(num_decode_nodes=2) as nodes, aclosing(nodes.relay.run(a_request())) as events:
        call, wire_id = await begun(nodes, events, token(7))
        say(nodes.decode, wire_id, TokenOutput(0, (8, 9)))
        assert await take(events) == TokenOutput(0, (8, 9))
        assert await soon(nodes.prefill.released) == "lease"
        nodes.decode.end_stream()
        next_event = asyncio.create_task(take(events))
        admit = await nodes.decodes[1].admit()
        again = await soon(nodes.prefill.calls)
        for asked in (admit, again.request):
            assert tuple(asked.prompt_token_ids) == (*PROMPT, 7, 8, 9)
            assert (asked.num_prior_output_tokens, asked.first_choice_index) == (3, 0)
            assert asked.request_id != wire_id
            assert asked.sampling_params == call.request.sampling_params, "the bounds are those of the whole output"
            assert 0 < asked.timeout_ms < call.request.timeout_ms, "what is left of the request's time"
        again.accept("again")
        again.finish(token(10), num_cached_tokens=12)
        again.end()
        assert await next_event == token(10)
        await nodes.decodes[1].started()
        nodes.decodes[1].kv_ready(admit.request_id, fetched=13)
        say(nodes.decodes[1], admit.request_id, token(11, finish=FinishReason.LENGTH))
        assert await take(events) == token(11, finish=FinishReason.LENGTH)
        assert await soon(nodes.prefill.released) == "again"
        trace = await take_trace(events)
        assert (trace.prefill_node, trace.decode_node, trace.num_migrations) == ("prefill-0", "decode-1", 1)
        assert trace.num_computed_tokens == 10, "of the prompt: what the replay computes is counted elsewhere"
        assert nodes.metric("request_migrations_total", cause="decode_node_lost") == 1
        assert nodes.metric("migrated_tokens_total") == 13
        assert nodes.metric("recomputed_tokens_total", cause="migration") == 1
        assert_idle(nodes)


async def test_the_prefill_node_of_a_trace_is_the_one_of_the_first_token() -> None:
    """The decode node that goes on after a loss prefills by itself, because no other node lives."""
    async with cluster(num_decode_nodes=2) as nodes, aclosing(nodes.relay.run(a_request())) as events:
        await begun(nodes, events, token(7))
        await nodes.prefill.stop()
        await until(lambda: nodes.registry.prefill[0].state is NodeState.LOST)
        nodes.decode.end_stream()
        next_event = asyncio.create_task(take(events))
        admit = await nodes.decodes[1].admit()
        assert admit.local_prefill
        say(nodes.decodes[1], admit.request_id, token(8, finish=FinishReason.STOP))
        assert await next_event == token(8, finish=FinishReason.STOP)
        trace = await take_trace(events)
        assert (trace.prefill_node, trace.decode_node) == ("prefill-0", "decode-1")


async def test_a_decode_node_that_answers_unavailable_is_lost_too() -> None:
    async with cluster(num_decode_nodes=2) as nodes, aclosing(nodes.relay.run(a_request())) as events:
        _, wire_id = await begun(nodes, events, token(7))
        nodes.decode.failed(wire_id, UnavailableError("crashed"))
        next_event = asyncio.create_task(take(events))
        assert tuple((await nodes.decodes[1].admit()).prompt_token_ids) == (*PROMPT, 7)
        nodes.decode.tokens(wire_id, token(8))  # too late to count
        (await soon(nodes.prefill.calls)).finish(token(8, finish=FinishReason.STOP))
        assert await next_event == token(8, finish=FinishReason.STOP)
        await take_trace(events)


async def test_a_lease_that_was_granted_unheard_is_released() -> None:
    """The decode node is lost while the grant of the lease is under way, or has come but is not read yet."""
    async with cluster(num_decode_nodes=2) as nodes:
        events = nodes.relay.run(a_request())
        first = asyncio.create_task(take(events))
        call = await soon(nodes.prefill.calls)
        await nodes.decode.admit()
        nodes.decode.end_stream()
        await call.over.wait()
        assert await soon(nodes.prefill.released) == call.request.request_id
        await nodes.decodes[1].admit()
        await give_up(first)


async def test_a_decode_node_lost_before_the_first_token_is_replaced_with_its_prefill() -> None:
    async with cluster(num_decode_nodes=2) as nodes, aclosing(nodes.relay.run(a_request(n=2))) as events:
        first, call, _ = await opened(nodes, events)
        call.publish(1)
        await nodes.decode.pull()
        nodes.decode.end_stream()
        await call.over.wait()
        assert await soon(nodes.prefill.released) == "lease"
        admit = await nodes.decodes[1].admit()
        assert (admit.sampling_params.n, admit.num_prior_output_tokens, tuple(admit.prompt_token_ids)) == (2, 0, PROMPT)
        again = await soon(nodes.prefill.calls)
        said = [token(7, finish=FinishReason.STOP), token(8, index=1, finish=FinishReason.STOP)]
        again.finish(*said, num_cached_tokens=8)  # which it computed the first time
        assert [await first, await take(events)] == said
        trace = await take_trace(events)
        assert (trace.num_migrations, trace.num_computed_tokens, trace.num_cached_tokens) == (1, 10, 0)


async def test_only_unfinished_outputs_go_on_each_under_its_index() -> None:
    """Of four outputs, one has ended, and the client needs no more of another."""
    async with cluster(num_decode_nodes=2, local_prefill_max_tokens=64) as nodes:
        async with aclosing(nodes.relay.run(a_request(n=4))) as events:
            first = asyncio.create_task(take(events))
            wire_id = (await nodes.decode.admit()).request_id
            said = [token(10), token(20, index=1, finish=FinishReason.STOP), token(30, index=2), token(40, index=3)]
            say(nodes.decode, wire_id, *said)
            assert [await first, *[await take(events) for _ in said[1:]]] == said
            nodes.relay.finish("r", 0)
            nodes.decode.end_stream()
            next_event = asyncio.create_task(take(events))
            admits = [await nodes.decodes[1].admit() for _ in range(2)]
            found = {admit.first_choice_index: tuple(admit.prompt_token_ids) for admit in admits}
            assert found == {2: (*PROMPT, 30), 3: (*PROMPT, 40)}
            assert all((admit.sampling_params.n, admit.local_prefill) == (1, True) for admit in admits)
            for admit in admits:
                index = admit.first_choice_index
                say(nodes.decodes[1], admit.request_id, token(50 + index, index=index, finish=FinishReason.STOP))
            assert {(await next_event), await take(events)} == {
                token(50 + index, index=index, finish=FinishReason.STOP) for index in (2, 3)
            }
            assert (await take_trace(events)).num_migrations == 2
        assert nodes.decodes[1].commands.empty()
        assert_idle(nodes)


@pytest.mark.parametrize("by_client", [True, False])
async def test_outputs_that_are_placed_alone_keep_their_index_and_end_alone(*, by_client: bool) -> None:
    """The index is part of what a node draws its random numbers from."""
    async with cluster(num_decode_nodes=2) as nodes, aclosing(nodes.relay.run(a_request(n=2))) as events:
        await begun(nodes, events, token(10), token(20, index=1))
        nodes.decode.end_stream()
        next_event = asyncio.create_task(take(events))
        admits = [await nodes.decodes[1].admit() for _ in range(2)]
        calls = [await soon(nodes.prefill.calls) for _ in range(2)]
        calls.sort(key=lambda call: call.request.first_choice_index)  # they come in any order
        for asked in (admits, [call.request for call in calls]):
            found = {request.first_choice_index: tuple(request.prompt_token_ids) for request in asked}
            assert found == {0: (*PROMPT, 10), 1: (*PROMPT, 20)}
        if by_client:
            nodes.relay.finish("r", 0)
        else:
            calls[0].finish(token(11, finish=FinishReason.STOP))
            assert await next_event == token(11, finish=FinishReason.STOP)
            next_event = asyncio.create_task(take(events))
        assert await nodes.decodes[1].aborted() == admits[0].request_id, "nobody waits for the rest of it"
        await calls[0].over.wait()
        calls[1].finish(token(21, index=1, finish=FinishReason.STOP))
        assert await next_event == token(21, index=1, finish=FinishReason.STOP)
        await take_trace(events)


async def test_an_output_without_a_token_is_placed_alone_once_another_one_has_a_token() -> None:
    async with (
        cluster(num_prefill_nodes=0, num_decode_nodes=2) as nodes,
        aclosing(nodes.relay.run(a_request(n=2))) as events,
    ):
        first = asyncio.create_task(take(events))
        say(nodes.decode, (await nodes.decode.admit()).request_id, token(8, index=1))
        assert await first == token(8, index=1)
        next_event = asyncio.create_task(take(events))
        nodes.decode.end_stream()
        for index, prompt in enumerate((PROMPT, (*PROMPT, 8))):
            admit = await nodes.decodes[1].admit()
            assert (admit.first_choice_index, tuple(admit.prompt_token_ids)) == (index, prompt)
        await give_up(next_event)


@pytest.mark.parametrize("by_client", [True, False])
async def test_outputs_without_a_token_are_placed_alone_once_another_one_has_ended(*, by_client: bool) -> None:
    """Placed together, outputs have consecutive indices."""
    async with cluster(num_decode_nodes=2, local_prefill_max_tokens=64) as nodes:
        async with aclosing(nodes.relay.run(a_request(n=3))) as events:
            next_event = asyncio.create_task(take(events))
            wire_id = (await nodes.decode.admit()).request_id
            if by_client:
                nodes.relay.finish("r", 1)
            else:
                say(nodes.decode, wire_id, token(20, index=1, finish=FinishReason.STOP))
                await next_event
                next_event = asyncio.create_task(take(events))
            nodes.decode.end_stream()
            admits = [await nodes.decodes[1].admit() for _ in range(2)]
            assert [(admit.first_choice_index, admit.sampling_params.n) for admit in admits] == [(0, 1), (2, 1)]
            await give_up(next_event)


async def test_prompt_logprobs_are_not_computed_twice() -> None:
    request = a_request()
    request = replace(request, sampling=replace(request.sampling, prompt_logprobs=0))
    async with cluster(num_decode_nodes=2) as nodes, aclosing(nodes.relay.run(request)) as events:
        first, call, _ = await opened(nodes, events)
        logprobs = PromptLogprobs.of([TokenLogprobs(101, -1.0, 1)])
        wire_token = common_pb2.TokenOutput(token_ids=[7], stop_token_id=-1)
        finished = prefill_node_pb2.PrefillFinished(
            first_tokens=[wire_token], prompt_logprobs=prompt_logprobs_to_wire(logprobs)
        )
        call.send(finished=finished)
        assert await first == logprobs
        assert await take(events) == token(7)
        nodes.decode.end_stream()
        next_event = asyncio.create_task(take(events))
        admit = await nodes.decodes[1].admit()
        assert call.request.sampling_params.HasField("prompt_logprobs")
        assert not admit.sampling_params.HasField("prompt_logprobs")
        (await soon(nodes.prefill.calls)).finish(token(8, finish=FinishReason.STOP))
        assert await next_event == token(8, finish=FinishReason.STOP)


async def test_prompt_logprobs_that_came_before_the_loss_are_not_sent_twice() -> None:
    """The decode node prefills, and is lost after it has sent these and before it has sent the first token."""
    request = a_request()
    request = replace(request, sampling=replace(request.sampling, prompt_logprobs=0))
    async with cluster(num_decode_nodes=2, local_prefill_max_tokens=64) as nodes:
        async with aclosing(nodes.relay.run(request)) as events:
            first = asyncio.create_task(take(events))
            wire_id = (await nodes.decode.admit()).request_id
            logprobs = prompt_logprobs_to_wire(PromptLogprobs.of([TokenLogprobs(101, -1.0, 1)]))
            nodes.decode.send(decode_node_pb2.DecodeEvent(request_id=wire_id, prompt_logprobs=logprobs))
            assert isinstance(await first, PromptLogprobs)
            nodes.decode.end_stream()
            next_event = asyncio.create_task(take(events))
            admit = await nodes.decodes[1].admit()
            assert not admit.sampling_params.HasField("prompt_logprobs")
            nodes.decodes[1].tokens(admit.request_id, token(7, finish=FinishReason.STOP))
            assert await next_event == token(7, finish=FinishReason.STOP)


DAMAGED = common_pb2.PromptLogprobs(token_ids=bytes(3))


async def test_an_answer_of_a_prefill_node_that_breaks_the_protocol_has_its_prompt_computed_elsewhere() -> None:
    async with cluster(num_prefill_nodes=2) as nodes, aclosing(nodes.relay.run(a_request())) as events:
        first, call, wire_id = await opened(nodes, events)
        wire_token = common_pb2.TokenOutput(token_ids=[7], stop_token_id=-1)
        finished = prefill_node_pb2.PrefillFinished(first_tokens=[wire_token], prompt_logprobs=DAMAGED)
        call.send(finished=finished)
        assert await nodes.decode.aborted() == wire_id
        assert await soon(nodes.prefill.released) == "lease"
        (await soon(nodes.prefills[1].calls)).finish(token(8, finish=FinishReason.STOP))
        assert await first == token(8, finish=FinishReason.STOP)


async def test_an_answer_of_a_decode_node_that_breaks_the_protocol_ends_its_own_request_only() -> None:
    async with cluster(local_prefill_max_tokens=64) as nodes:
        async with aclosing(nodes.relay.run(a_request("bad"))) as bad, aclosing(nodes.relay.run(a_request())) as good:
            waiting = [asyncio.create_task(take(bad)), asyncio.create_task(take(good))]
            admits = [await nodes.decode.admit() for _ in waiting]
            broken, other = (admit.request_id for admit in admits)
            nodes.decode.send(decode_node_pb2.DecodeEvent(request_id=broken, prompt_logprobs=DAMAGED))
            with pytest.raises(KVRelayError, match="log-probabilities of the prompt are damaged"):
                await waiting[0]
            assert await nodes.decode.aborted() == broken
            nodes.decode.tokens(other, token(7, finish=FinishReason.STOP))
            assert await waiting[1] == token(7, finish=FinishReason.STOP)


async def test_another_prefill_node_is_tried_before_the_decode_node_prefills() -> None:
    async with cluster(num_prefill_nodes=2) as nodes, aclosing(nodes.relay.run(a_request())) as events:
        first, call, wire_id = await opened(nodes, events)
        call.end(UnavailableError("out of luck"))
        assert await nodes.decode.aborted() == wire_id
        admit = await nodes.decode.admit()
        assert not admit.local_prefill
        second = await soon(nodes.prefills[1].calls)
        second.end(UnavailableError("no luck either"))
        assert await nodes.decode.aborted() == admit.request_id
        admit = await nodes.decode.admit()
        assert admit.local_prefill
        say(nodes.decode, admit.request_id, token(7, finish=FinishReason.STOP))
        assert await first == token(7, finish=FinishReason.STOP)
        trace = await take_trace(events)
        assert (trace.prefill_node, trace.num_migrations) == (None, 2)
        assert nodes.metric("request_migrations_total", cause="prefill_node_lost") == 2


async def test_a_prefill_node_that_was_lost_is_no_last_resort() -> None:
    """A decode node that was lost is one, if no other lives."""
    async with cluster() as nodes, aclosing(nodes.relay.run(a_request())) as events:
        first, call, wire_id = await opened(nodes, events)
        call.end(UnavailableError("out of luck"))
        assert await nodes.decode.aborted() == wire_id
        nodes.decode.failed((await nodes.decode.admit()).request_id, UnavailableError("crashed"))
        admit = await nodes.decode.admit()
        assert admit.local_prefill
        say(nodes.decode, admit.request_id, token(7, finish=FinishReason.STOP))
        assert await first == token(7, finish=FinishReason.STOP)


async def test_a_prefill_node_that_was_lost_is_not_asked_for_a_refill() -> None:
    async with cluster(num_prefill_nodes=2) as nodes, aclosing(nodes.relay.run(a_request())) as events:
        first, call, wire_id = await opened(nodes, events)
        call.end(UnavailableError("out of luck"))
        assert await nodes.decode.aborted() == wire_id
        admit = await nodes.decode.admit()
        again = await soon(nodes.prefills[1].calls)
        again.finish(token(7))
        again.end()
        assert await first == token(7)
        await nodes.decode.started()
        following = asyncio.create_task(take(events))
        assert (await nodes.decode.pull()).ended
        nodes.decode.kv_missing(admit.request_id, 10)
        assert (await nodes.decode.pull()).final, "no other node lives"
        await give_up(following)


async def test_a_decode_node_that_comes_back_is_used_again_when_no_other_lives() -> None:
    """The node's stream breaks, but the node does not end."""
    async with cluster() as nodes, aclosing(nodes.relay.run(a_request())) as events:
        await begun(nodes, events, token(7))
        nodes.decode.end_stream()
        next_event = asyncio.create_task(take(events))
        admit = await nodes.decode.admit()
        assert tuple(admit.prompt_token_ids) == (*PROMPT, 7)
        assert nodes.decode.num_streams == 2
        (await soon(nodes.prefill.calls)).finish(token(8, finish=FinishReason.STOP))
        assert await next_event == token(8, finish=FinishReason.STOP)
        assert (await take_trace(events)).num_migrations == 1


async def test_a_node_that_runs_fewer_sequences_than_a_request_has_outputs_is_not_chosen() -> None:
    """Where they run apart it may be: each output that has begun goes on alone."""
    async with cluster(num_prefill_nodes=0, num_decode_nodes=3) as nodes:
        nodes.decodes[1].max_num_seqs = 1
        await nodes.decodes[1].stop()
        await until(lambda: nodes.registry.decode[1].state is NodeState.LOST)
        await nodes.decodes[1].start_again(epoch=2)
        await until(lambda: nodes.registry.decode[1].state is NodeState.LIVE)
        nodes.decodes[2].update(1, num_queued_tokens=1000)
        await until(lambda: nodes.registry.decode[2].load.num_queued_tokens > 0)
        async with aclosing(nodes.relay.run(a_request(n=2))) as events:
            first = asyncio.create_task(take(events))
            await nodes.decode.admit()
            nodes.decode.end_stream()
            admit = await nodes.decodes[2].admit()
            assert admit.sampling_params.n == 2
            say(nodes.decodes[2], admit.request_id, token(7), token(8, index=1))
            assert [await first, await take(events)] == [token(7), token(8, index=1)]
            nodes.decodes[2].end_stream()
            next_event = asyncio.create_task(take(events))
            alone = await nodes.decodes[1].admit()
            assert alone.sampling_params.n == 1
            await give_up(next_event)
