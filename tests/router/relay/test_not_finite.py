"""The logits of a prefill node are not finite: the decode node is told to distrust what it has fetched, and only then
is the request placed again. The test decides each answer of the nodes."""

import asyncio
from contextlib import aclosing

import pytest

from kvrelay.core.errors import KVRelayError, NotFiniteError
from kvrelay.core.generation.outputs import FinishReason
from kvrelay.core.kv.block_hash import block_hashes
from kvrelay.v1 import decode_node_pb2
from tests.router.routed import LAST, PROMPT, a_request, assert_idle, opened, take, take_trace
from tests.router.scripted_cluster import cluster
from tests.router.scripted_nodes import BLOCK_SIZE, NAMESPACE, ScriptedDecode, soon, token, until

NOT_FINITE = NotFiniteError("the model returned logits that are not finite")


async def abort_of(node: ScriptedDecode) -> decode_node_pb2.Abort:
    return (await node._next("abort")).abort


@pytest.mark.parametrize("error", [NOT_FINITE, KVRelayError("internal error"), None])
async def test_what_came_from_a_prefill_node_is_distrusted_if_its_logits_are_not_finite(
    error: KVRelayError | None,
) -> None:
    async with cluster() as nodes, aclosing(nodes.relay.run(a_request())) as events:
        first, call, wire_id = await opened(nodes, events)
        call.publish(2)
        assert (await nodes.decode.pull()).num_blocks == 2
        call.end(error)
        abort = await abort_of(nodes.decode)
        assert (abort.request_id, abort.distrust) == (wire_id, error is NOT_FINITE)
        admit = await nodes.decode.admit()
        assert admit.local_prefill and admit.request_id != wire_id
        nodes.decode.tokens(admit.request_id, LAST)
        assert await first == LAST
        trace = await take_trace(events)
        assert trace.num_migrations == 1
        assert nodes.metric("request_migrations_total", cause="prefill_node_lost") == 1
        assert_idle(nodes)


@pytest.mark.parametrize("error", [NOT_FINITE, KVRelayError("internal error")])
async def test_what_others_hold_may_be_as_bad_until_they_have_heard_of_it(error: KVRelayError) -> None:
    async with cluster(num_prefill_nodes=2, num_decode_nodes=2) as nodes:
        names = list(block_hashes(NAMESPACE.root(), PROMPT, BLOCK_SIZE))
        nodes.decodes[1].update(1, stored=names, num_queued_tokens=5000)
        await until(lambda: nodes.registry.index.leading(names).get("decode-1") == len(names))
        async with aclosing(nodes.relay.run(a_request())) as events:
            first = asyncio.create_task(take(events))
            call = await soon(nodes.prefill.calls)
            assert call.request.sources and (await nodes.decode.admit()).sources
            call.end(error)
            await nodes.decode.aborted()
            admit, again = await nodes.decode.admit(), await soon(nodes.prefills[1].calls)
            for asked in (admit, again.request):
                assert bool(asked.sources) == (error is not NOT_FINITE)
            again.end(KVRelayError("another loss, which says nothing of the KV"))
            await nodes.decode.aborted()
            admit = await nodes.decode.admit()
            assert admit.local_prefill and bool(admit.sources) == (error is not NOT_FINITE)
            nodes.decode.tokens(admit.request_id, LAST)
            assert await first == LAST


async def test_so_is_what_came_from_a_refill_and_the_request_goes_on_elsewhere() -> None:
    async with cluster(num_prefill_nodes=2) as nodes, aclosing(nodes.relay.run(a_request())) as events:
        first, call, wire_id = await opened(nodes, events)
        call.finish(token(7))
        call.end()
        assert await first == token(7)
        await nodes.decode.started()
        following = asyncio.create_task(take(events))
        assert (await nodes.decode.pull()).ended
        nodes.decode.kv_missing(wire_id, len(PROMPT))
        refill = await soon(nodes.prefills[1].calls)
        refill.accept("second")
        refill.publish(2)
        assert (await nodes.decode.pull()).num_blocks == 2
        refill.end(NOT_FINITE)
        assert (await nodes.decode.pull()).ended
        abort = await abort_of(nodes.decode)
        assert (abort.request_id, abort.distrust) == (wire_id, True)
        admit = await nodes.decode.admit()
        assert tuple(admit.prompt_token_ids) == (*PROMPT, 7) and not admit.local_prefill
        again = await soon(nodes.prefill.calls)
        again.finish(token(8, finish=FinishReason.LENGTH))
        assert await following == token(8, finish=FinishReason.LENGTH)
        trace = await take_trace(events)
        assert (trace.prefill_node, trace.num_migrations) == ("prefill-0", 1)
        assert_idle(nodes)


async def test_a_request_that_is_given_up_blames_no_kv() -> None:
    async with cluster() as nodes, aclosing(nodes.relay.run(a_request())) as events:
        first, call, wire_id = await opened(nodes, events)
        call.publish(2)
        await nodes.decode.pull()
        nodes.relay.abort("r")
        with pytest.raises(KVRelayError):
            await first
        abort = await abort_of(nodes.decode)
        assert (abort.request_id, abort.distrust) == (wire_id, False)
