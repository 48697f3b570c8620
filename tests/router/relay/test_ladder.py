"""Blocks that do not arrive at the decode node: which nodes are asked for them, how often, and what is counted. The
test decides each answer of the nodes."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import pytest

from kvrelay.core.errors import UnavailableError
from kvrelay.core.generation.outputs import FinishReason
from kvrelay.core.generation.prompt_logprobs import PromptLogprobs
from kvrelay.core.kv.block_hash import block_hashes
from kvrelay.core.node_report import NOTHING_FETCHED
from kvrelay.core.outages import Outages
from kvrelay.v1 import node_pb2
from router.nodes.node import NodeState
from router.relay.attempt import RefillEvent
from router.relay.prefill_client import PrefillFinished
from router.request import KVOrigins, RequestEvent
from tests.manual_clock import ManualClock
from tests.router.routed import LAST, PROMPT, a_request, assert_idle, fetched, give_up, opened, take, take_trace
from tests.router.scripted_cluster import Cluster, cluster
from tests.router.scripted_nodes import (
    BLOCK_SIZE,
    NAMESPACE,
    PrefillCall,
    ScriptedNode,
    ScriptedPrefill,
    soon,
    token,
    until,
)

NAMES = list(block_hashes(NAMESPACE.root(cache_salt=b""), PROMPT, BLOCK_SIZE, include_partial=True))


async def holds(nodes: Cluster, node: ScriptedNode, num_blocks: int) -> None:
    """Returns once the router knows that this node holds the prompt's first blocks."""
    node.update(1, stored=NAMES[:num_blocks])
    await until(lambda: nodes.registry.index.leading(NAMES).get(node.node_id) == num_blocks)


async def published(
    nodes: Cluster, events: AsyncGenerator[RequestEvent, None]
) -> "tuple[asyncio.Task[RequestEvent], str]":
    """Returns once the client has the first token and decode-0 was told that prefill-0 publishes no more."""
    first, call, wire_id = await opened(nodes, events)
    call.publish(3)
    assert not (await nodes.decode.pull()).ended
    call.finish(token(7), num_cached_tokens=4)
    assert await first == token(7)
    await nodes.decode.started()
    call.end()
    following = asyncio.create_task(take(events))
    pull = await nodes.decode.pull()
    assert (pull.num_blocks, pull.ended, pull.final) == (3, True, False)
    return following, wire_id


async def refill_call(nodes: Cluster, wire_id: str, *, number: int = 1) -> PrefillCall:
    call = await soon(nodes.prefills[number].calls)
    assert call.request.request_id == f"{wire_id}.refill"
    assert tuple(call.request.prompt_token_ids) == PROMPT
    call.accept("second")
    return call


async def refilled(
    nodes: Cluster, events: AsyncGenerator[RequestEvent, None]
) -> "tuple[asyncio.Task[RequestEvent], str, PrefillCall]":
    """Returns once decode-0 has all blocks from a refill by prefill-1, which has not sampled its first token."""
    following, wire_id = await published(nodes, events)
    nodes.decode.kv_missing(wire_id, 10)
    call = await refill_call(nodes, wire_id)
    call.publish(3)
    await nodes.decode.pull()
    nodes.decode.kv_ready(wire_id, fetched=10, fetches=fetched(("prefill-1", 3)))
    return following, wire_id, call


async def test_the_decode_node_is_told_who_else_holds_what() -> None:
    async with cluster(num_decode_nodes=2) as nodes:
        await holds(nodes, nodes.decodes[1], 2)
        nodes.decodes[1].update(2, num_queued_tokens=5000)
        await until(lambda: nodes.registry.nodes[2].load.num_queued_tokens > 0)
        async with aclosing(nodes.relay.run(a_request())) as events:
            first = asyncio.create_task(take(events))
            admit = await nodes.decode.admit()
            [source] = admit.sources
            assert (source.source.node_id, source.source.epoch, source.num_blocks) == ("decode-1", 1, 2)
            call = await soon(nodes.prefill.calls)
            call.finish(token(7, finish=FinishReason.STOP))
            await first


async def test_what_others_had_is_counted_by_rung() -> None:
    async with cluster() as nodes, aclosing(nodes.relay.run(a_request())) as events:
        following, wire_id = await published(nodes, events)
        report = fetched(("prefill-0", 1), ("decode-1", 1), ("", 1), num_refused=1, num_missing=2, num_failed=3)
        nodes.decode.kv_ready(wire_id, fetched=10, fetches=report)
        nodes.decode.tokens(wire_id, LAST)
        assert await following == LAST
        trace = await take_trace(events)
        assert trace.kv == KVOrigins(num_prefill_node_blocks=1, num_holder_blocks=1, num_store_blocks=1)
        for rung in ("prefill_node", "holder", "store"):
            assert nodes.metric("kv_ladder_blocks_total", reader="decode", rung=rung) == 1
        for cause, count in (("refused", 1), ("missing", 2), ("failed", 3)):
            assert nodes.metric("kv_ladder_failures_total", reader="decode", cause=cause) == count


async def test_kv_that_does_not_arrive_is_logged_once_until_it_does(caplog: pytest.LogCaptureFixture) -> None:
    """With one of several prefill nodes out of reach, that of every other request may arrive."""
    caplog.set_level(logging.INFO)
    clock = ManualClock()
    async with cluster() as nodes:
        nodes.registry.decode[0].outages = Outages(clock.now)
        for number, arrives in enumerate((False, False, True, False, True, True, False)):
            if number == 4:
                clock.seconds += 30.0
            async with aclosing(nodes.relay.run(a_request())) as events:
                following, wire_id = await published(nodes, events)
                if arrives:
                    nodes.decode.kv_ready(wire_id, fetched=10, fetches=fetched(("prefill-0", 3)))
                else:
                    nodes.decode.kv_missing(wire_id, 10)
                    assert (await nodes.decode.pull()).final
                    nodes.decode.kv_ready(wire_id, fetched=4, recomputed=6, fetches=fetched(("prefill-0", 1)))
                nodes.decode.tokens(wire_id, LAST)
                assert await following == LAST
                await take_trace(events)
    lost = "the KV of 10 tokens did not get to decode-0, and is computed again by decode-0"
    said = [message.partition(": ")[2] or message for message in caplog.messages if "KV" in message]
    again = "moving KV to decode-0 works again; it failed 3 times"
    assert said == [f"{lost}; not logged again while it fails", again, f"{lost}; not logged again while it fails"]


async def test_missing_blocks_are_prefilled_by_another_node() -> None:
    async with cluster(num_prefill_nodes=2) as nodes, aclosing(nodes.relay.run(a_request())) as events:
        following, wire_id = await published(nodes, events)
        nodes.decode.kv_missing(wire_id, 10)
        call = await refill_call(nodes, wire_id)
        assert call.request.timeout_ms < 60_000, "what is left of the request's time"
        assert nodes.registry.prefill[1].num_queued_tokens == 10
        nodes.decode.kv_missing(wire_id, 10)  # asked again meanwhile: the answer is on its way
        call.publish(2)
        pull = await nodes.decode.pull()
        assert (pull.source.node_id, pull.num_blocks, pull.ended, pull.final) == ("prefill-1", 2, False, False)
        call.finish(token(7), num_cached_tokens=4)  # the client has it already
        call.publish(3)
        assert (await nodes.decode.pull()).num_blocks == 3
        assert nodes.registry.prefill[1].num_queued_tokens == 0
        call.end()
        assert (await nodes.decode.pull()).ended
        assert nodes.prefill.released.empty()
        nodes.decode.kv_ready(wire_id, fetched=10, fetches=fetched(("prefill-0", 1), ("prefill-1", 2)))
        assert await soon(nodes.prefill.released) == "lease"
        assert await soon(nodes.prefills[1].released) == "second"
        nodes.decode.tokens(wire_id, LAST)
        assert await following == LAST
        trace = await take_trace(events)
        assert trace.kv == KVOrigins(num_prefill_node_blocks=1, num_refill_blocks=2, num_refilled_tokens=6)
        assert (trace.prefill_node, trace.num_migrations) == ("prefill-0", 0)
        assert (trace.num_computed_tokens, trace.num_cached_tokens) == (6, 4), "both nodes computed the same 6"
        assert nodes.metric("kv_refills_total") == 1
        assert nodes.metric("recomputed_tokens_total", cause="refill") == 6
        assert_idle(nodes)


async def test_a_request_that_ends_before_its_refill_counts_what_that_was_to_compute() -> None:
    """A refill publishes its blocks before it samples its first token. A short output may be complete before that."""
    async with cluster(num_prefill_nodes=2) as nodes, aclosing(nodes.relay.run(a_request())) as events:
        following, wire_id, _ = await refilled(nodes, events)
        nodes.decode.tokens(wire_id, LAST)
        assert await following == LAST
        trace = await take_trace(events)
        assert trace.kv == KVOrigins(num_refill_blocks=3, num_refilled_tokens=10)
        assert await soon(nodes.prefills[1].released) == "second"
        assert_idle(nodes)


async def test_a_refill_whose_blocks_have_arrived_ends_with_its_first_token() -> None:
    """The request goes on, without it."""
    async with cluster(num_prefill_nodes=2) as nodes, aclosing(nodes.relay.run(a_request())) as events:
        following, wire_id, call = await refilled(nodes, events)
        assert await soon(nodes.prefill.released) == "lease"
        assert nodes.prefills[1].released.empty()
        call.finish(token(7), num_cached_tokens=4)
        assert await soon(nodes.prefills[1].released) == "second"
        assert nodes.decode.commands.empty()
        [group] = nodes.relay._running["r"]._groups
        assert group.attempt is not None
        group.attempt._sink(
            RefillEvent(PrefillFinished((token(7),), PromptLogprobs(), 4, NOTHING_FETCHED))
        )  # nobody listens
        nodes.decode.tokens(wire_id, LAST)
        assert await following == LAST
        assert (await take_trace(events)).kv == KVOrigins(num_refill_blocks=3, num_refilled_tokens=6)


async def test_a_refill_is_asked_for_blocks_only() -> None:
    """A refill has one output and no log-probabilities: prompt log-probabilities would compute the whole prompt once
    more. So it goes to the node that holds it."""
    async with cluster(num_prefill_nodes=3) as nodes:
        await holds(nodes, nodes.prefills[2], 3)
        request = a_request(n=2)
        request = replace(request, sampling=replace(request.sampling, prompt_logprobs=1, logprobs=2))
        async with aclosing(nodes.relay.run(request)) as events:
            first, call, wire_id = await opened(nodes, events)
            call.finish(token(7), token(17, index=1))
            call.end()
            await first
            assert [await take(events) for _ in range(2)] == [token(7), token(17, index=1)]
            following = asyncio.create_task(take(events))
            await nodes.decode.started()
            await nodes.decode.pull()
            nodes.decode.kv_missing(wire_id, 10)
            refill = await refill_call(nodes, wire_id, number=2)
            refill.publish(1)
            await nodes.decode.pull()
            sampling = refill.request.sampling_params
            assert sampling.n == 1
            assert not sampling.HasField("prompt_logprobs") and not sampling.HasField("logprobs")
            nodes.decode.tokens(wire_id, token(8, finish=FinishReason.STOP))
            nodes.decode.tokens(wire_id, token(18, index=1, finish=FinishReason.STOP))
            await following
            await take(events)
            await take_trace(events)
        assert await soon(nodes.prefills[2].released) == "second"


async def test_a_refill_that_fails_leaves_the_rest_to_the_decode_node() -> None:
    async with cluster(num_prefill_nodes=3) as nodes, aclosing(nodes.relay.run(a_request())) as events:
        following, wire_id = await published(nodes, events)
        nodes.decode.kv_missing(wire_id, 10)
        await until(lambda: any(not node.calls.empty() for node in nodes.prefills[1:]))
        second = next(node for node in nodes.prefills[1:] if not node.calls.empty())
        call = await soon(second.calls)
        call.publish(1)
        assert (await nodes.decode.pull()).num_blocks == 1
        call.end(UnavailableError("died"))
        pull = await nodes.decode.pull()
        assert (pull.source.node_id, pull.ended, pull.final) == (second.node_id, True, False)
        assert [node.num_queued_tokens for node in nodes.registry.prefill] == [0, 0, 0]
        nodes.decode.kv_missing(wire_id, 6)
        assert (await nodes.decode.pull()).final, "one refill per attempt"
        nodes.decode.kv_ready(wire_id, fetched=4, recomputed=6, fetches=fetched((second.node_id, 1)))
        nodes.decode.tokens(wire_id, LAST)
        assert await following == LAST
        trace = await take_trace(events)
        assert trace.kv == KVOrigins(num_refill_blocks=1, num_recomputed_tokens=6)
        assert nodes.metric("kv_ladder_blocks_total", reader="decode", rung="local") == 2
        assert nodes.metric("recomputed_tokens_total", cause="transfer") == 6
        assert_idle(nodes)


@pytest.mark.parametrize(("num_prefill_nodes", "local_prefill_max_tokens"), [(1, 0), (2, 5)])
async def test_without_another_node_or_for_a_few_tokens_the_decode_node_computes(
    num_prefill_nodes: int, local_prefill_max_tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        cluster(num_prefill_nodes=num_prefill_nodes, local_prefill_max_tokens=local_prefill_max_tokens) as nodes,
        aclosing(nodes.relay.run(a_request())) as events,
    ):
        following, wire_id = await published(nodes, events)
        nodes.decode.kv_missing(wire_id, 5)
        assert (await nodes.decode.pull()).final
        assert f"{wire_id}: the KV of 5 tokens did not get to decode-0" in caplog.text
        nodes.decode.kv_ready(wire_id, fetched=5, recomputed=5)
        nodes.decode.tokens(wire_id, LAST)
        assert await following == LAST
        assert (await take_trace(events)).kv.num_recomputed_tokens == 5
        assert all(node.calls.empty() for node in nodes.prefills)


async def publish_to_the_store_alone(nodes: Cluster, node: ScriptedPrefill) -> None:
    node.endpoint = ""
    await node.stop()
    await node.start_again(epoch=2)
    handle = nodes.registry.prefill[nodes.prefills.index(node)]
    await until(lambda: handle.state is NodeState.LIVE and handle.source.epoch == 2)


async def test_what_the_store_alone_did_not_bring_is_computed_by_the_decode_node() -> None:
    async with cluster(num_prefill_nodes=2) as nodes:
        for node in nodes.prefills:
            await publish_to_the_store_alone(nodes, node)
        async with aclosing(nodes.relay.run(a_request())) as events:
            following, wire_id = await published(nodes, events)
            nodes.decode.kv_missing(wire_id, 10)
            assert (await nodes.decode.pull()).final
            nodes.decode.kv_ready(wire_id, fetched=0, recomputed=10)
            nodes.decode.tokens(wire_id, LAST)
            assert await following == LAST
            assert (await take_trace(events)).kv.num_recomputed_tokens == 10
            assert all(node.calls.empty() for node in nodes.prefills)


@pytest.mark.parametrize("number", [0, 1])
async def test_a_refill_may_bring_what_the_store_did_not_if_one_of_the_two_nodes_sends_by_itself(number: int) -> None:
    async with cluster(num_prefill_nodes=2) as nodes:
        await publish_to_the_store_alone(nodes, nodes.prefills[number])
        async with aclosing(nodes.relay.run(a_request())) as events:
            following, wire_id = await published(nodes, events)
            nodes.decode.kv_missing(wire_id, 10)
            await refill_call(nodes, wire_id)
            await give_up(following)


async def test_closing_ends_the_refill_and_both_leases() -> None:
    async with cluster(num_prefill_nodes=2) as nodes:
        events = nodes.relay.run(a_request())
        following, wire_id = await published(nodes, events)
        nodes.decode.kv_missing(wire_id, 10)
        call = await refill_call(nodes, wire_id)
        call.publish(1)
        await nodes.decode.pull()
        following.cancel()
        with pytest.raises(asyncio.CancelledError):
            await following
        await events.aclose()
        assert await nodes.decode.aborted() == wire_id
        assert await soon(nodes.prefill.released) == "lease"
        assert await soon(nodes.prefills[1].released) == "second"
        await call.over.wait()
        assert_idle(nodes)


async def test_a_prefill_node_that_stops_talking_after_its_first_token_is_given_up() -> None:
    async with cluster(lease_ttl=0.05) as nodes, aclosing(nodes.relay.run(a_request())) as events:
        first, call, wire_id = await opened(nodes, events)
        call.finish(token(7))
        assert await first == token(7)
        await nodes.decode.started()
        following = asyncio.create_task(take(events))
        pull = await nodes.decode.pull()
        assert (pull.num_blocks, pull.ended) == (0, True)
        nodes.decode.tokens(wire_id, LAST)
        assert await following == LAST
        await call.over.wait()


async def test_a_refill_for_the_last_decode_node_while_it_drains() -> None:
    """A draining node finishes its requests, although nothing new can be placed."""
    async with cluster(num_prefill_nodes=2) as nodes, aclosing(nodes.relay.run(a_request())) as events:
        following, wire_id = await published(nodes, events)
        load = node_pb2.NodeLoad(num_blocks=1000)
        nodes.decode.updates.put_nowait(node_pb2.WatchResponse(epoch=1, sequence=1, load=load, draining=True))
        await until(lambda: nodes.registry.decode[0].state is NodeState.DRAINING)
        nodes.decode.kv_missing(wire_id, 10)
        call = await refill_call(nodes, wire_id)
        call.publish(3)
        assert (await nodes.decode.pull()).num_blocks == 3
        nodes.decode.kv_ready(wire_id, fetched=10)
        nodes.decode.tokens(wire_id, LAST)
        assert await following == LAST


async def test_a_refill_that_goes_well_ends_a_row_of_failures() -> None:
    async with cluster(num_prefill_nodes=2) as nodes, aclosing(nodes.relay.run(a_request())) as events:
        following, wire_id = await published(nodes, events)
        outlier = nodes.registry.prefill[1].outlier
        for _ in range(4):
            outlier.failed(UnavailableError("before"))
        nodes.decode.kv_missing(wire_id, 10)
        call = await refill_call(nodes, wire_id)
        call.finish(token(7))
        call.end()
        assert (await nodes.decode.pull()).ended
        outlier.failed(UnavailableError("after"))
        assert not outlier.is_ejected
        nodes.decode.tokens(wire_id, LAST)
        assert await following == LAST


async def test_refills_that_fail_count_against_the_node() -> None:
    async with cluster(num_prefill_nodes=2) as nodes:
        for number in range(5):
            nodes.prefills[1].update(number + 1, num_queued_tokens=5000)  # so that it is the second choice
            await until(lambda: nodes.registry.prefill[1].load.num_queued_tokens > 0)
            async with aclosing(nodes.relay.run(a_request(f"r{number}"))) as events:
                following, wire_id = await published(nodes, events)
                nodes.decode.kv_missing(wire_id, 10)
                call = await refill_call(nodes, wire_id)
                call.end(UnavailableError("died"))
                assert (await nodes.decode.pull()).ended
                nodes.decode.tokens(wire_id, LAST)
                assert await following == LAST
                await take_trace(events)
        assert nodes.registry.prefill[1].outlier.is_ejected
