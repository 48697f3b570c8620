"""From a request to its placement: what nodes are told follows from what they hold."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest

from kvrelay.core.errors import UnavailableError
from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.core.kv.block_hash import block_hashes
from kvrelay.core.node_report import NodeRole
from kvrelay.v1 import node_pb2, prefill_node_pb2
from router.nodes.node import NodeHandle
from router.request import NodeRequest, RoutedRequest
from tests.router.routed import give_up, take
from tests.router.scripted_cluster import Cluster, cluster
from tests.router.scripted_nodes import BLOCK_SIZE, NAMESPACE, soon, token, until

PROMPT = tuple(range(200, 210))  # two full blocks and a partial one


NODE_REQUEST = NodeRequest(
    token_ids=PROMPT,
    sampling=SamplingParams(seed=1),
    kv_namespace=NAMESPACE,
    priority=0,
    cache_salt=b"",
    num_prior_output_tokens=0,
    first_choice_index=0,
    is_replay=False,
)


@asynccontextmanager
async def decode_node_holds_the_prompt() -> AsyncIterator[Cluster]:
    async with cluster() as nodes:
        held = list(block_hashes(NAMESPACE.root(), PROMPT, BLOCK_SIZE, include_partial=True))
        nodes.decode.update(1, stored=held)
        await until(lambda: nodes.registry.index.leading(held) == {"decode-0": 3})
        yield nodes


async def prefill_request(nodes: Cluster, request: RoutedRequest) -> prefill_node_pb2.PrefillRequest:
    async with aclosing(nodes.relay.run(request)) as events:
        first = asyncio.ensure_future(anext(events))
        call = await soon(nodes.prefill.calls)
        queued = nodes.registry.prefill[0].num_queued_tokens
        assert queued == (2 if call.request.sources else 10)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
    return call.request


async def test_the_prefill_node_is_told_who_holds_leading_blocks() -> None:
    async with decode_node_holds_the_prompt() as nodes:
        request = RoutedRequest("r", PROMPT, SamplingParams(seed=1), NAMESPACE, timeout=60.0, priority=-3)
        asked = await prefill_request(nodes, request)
        [source] = asked.sources
        assert (source.source.node_id, source.source.endpoint, source.num_blocks) == (
            "decode-0",
            "endpoint-decode-0",
            2,
        )
        assert (asked.priority, tuple(asked.prompt_token_ids)) == (-3, PROMPT)


@pytest.mark.parametrize("computes_there", [True, False])
async def test_a_prompt_is_queued_at_the_node_that_computes_it_until_its_first_token(computes_there: bool) -> None:
    async with cluster(local_prefill_max_tokens=64 if computes_there else 0) as nodes:
        request = RoutedRequest("r", PROMPT, SamplingParams(seed=1), NAMESPACE, timeout=60.0, priority=-3)
        async with aclosing(nodes.relay.run(request)) as events:
            first = asyncio.create_task(take(events))
            admit = await nodes.decode.admit()
            assert admit.priority == -3
            queued = [node.num_queued_tokens for node in nodes.registry.nodes]
            assert queued == ([0, 10] if computes_there else [10, 0])
            if computes_there:
                nodes.decode.tokens(admit.request_id, token(7))
            else:
                (await soon(nodes.prefill.calls)).finish(token(7))
            assert await first == token(7)
            assert [node.num_queued_tokens for node in nodes.registry.nodes] == [0, 0]


async def test_a_prompt_follows_one_with_the_same_beginning_until_that_is_computed() -> None:
    """The other node has less to compute. With prompt log-probabilities, all of a prompt is computed anywhere."""
    long = tuple(range(600))  # two beginnings and 88 tokens
    placed = replace(NODE_REQUEST, token_ids=long)
    with_logprobs = replace(placed, sampling=SamplingParams(seed=1, prompt_logprobs=0))
    async with cluster(num_prefill_nodes=2, local_prefill_max_tokens=0) as nodes:
        followed, other = nodes.registry.prefill
        request = RoutedRequest("r", long, SamplingParams(seed=1), NAMESPACE, timeout=60.0)
        async with aclosing(nodes.relay.run(request)) as events:
            first = asyncio.create_task(take(events))
            call = await soon(nodes.prefill.calls)
            assert (followed.num_queued_tokens, len(followed.coming)) == (600, 2)
            other.num_queued_tokens += 550
            for node_request, node, num_tokens in ((placed, followed, 88), (with_logprobs, other, 600)):
                prefill = nodes.placer.place(node_request, lost=set(), last_resort=False).prefill
                assert prefill is not None
                assert (prefill.node, prefill.num_uncached_tokens) == (node, num_tokens)
            other.num_queued_tokens -= 550
            call.finish(token(7))
            assert await first == token(7)
            assert (followed.num_queued_tokens, len(followed.coming)) == (0, 0)


async def test_requests_that_nodes_have_not_reported_yet_count_too() -> None:
    """The third request would be the first node's turn again."""
    async with cluster(num_prefill_nodes=2, num_decode_nodes=2) as nodes:
        waiting = []
        for number, place in enumerate((0, 1, 1)):
            request = RoutedRequest(f"r{number}", PROMPT, SamplingParams(seed=1), NAMESPACE, timeout=60.0)
            waiting.append(asyncio.create_task(take(nodes.relay.run(request))))
            await nodes.decodes[place].admit()
            await soon(nodes.prefills[place].calls)
            if number == 1:
                await give_up(waiting.pop())
                await nodes.decodes[place].aborted()
        for task in waiting:
            await give_up(task)


@pytest.mark.parametrize(
    ("load", "chosen"),
    [
        ({"num_free_blocks": 1000}, "decode-0"),
        ({"num_free_blocks": 0}, "decode-1"),
        ({"num_free_blocks": 1000, "num_requests_waiting": 3}, "decode-1"),
        ({"num_free_blocks": 1000, "num_requests_running": 3}, "decode-1"),
        ({"num_free_blocks": 1000, "num_queued_tokens": 5000}, "decode-1"),
    ],
)
async def test_a_decode_node_is_chosen_by_the_load_that_nodes_report(load: dict[str, int], chosen: str) -> None:
    async with cluster(num_decode_nodes=2) as nodes:
        message = node_pb2.NodeLoad(num_blocks=1000, num_leases=1, **load)
        nodes.decode.updates.put_nowait(node_pb2.WatchResponse(epoch=1, sequence=1, load=message))
        await until(lambda: nodes.registry.decode[0].load.num_leases == 1)
        placement = nodes.placer.place(NODE_REQUEST, lost=set(), last_resort=False)
        assert placement.decode.source.node_id == chosen


async def test_prompts_that_this_router_has_queued_at_a_decode_node_count_before_it_reports_them() -> None:
    """Without them the first node would be chosen, whose turn it is."""
    async with cluster(num_decode_nodes=2) as nodes:
        queued, other = nodes.registry.decode
        queued.num_queued_tokens += 5000
        assert nodes.placer.place(NODE_REQUEST, lost=set(), last_resort=False).decode.node is other
        queued.num_queued_tokens -= 5000


async def test_blocks_that_this_router_has_claimed_count_until_the_node_reports_its_load() -> None:
    """Without them the node with room for one more request would get all that come before its next report."""
    async with cluster(num_decode_nodes=2) as nodes:
        roomy, full = nodes.registry.decode
        num_new_blocks = -(-len(PROMPT) // NAMESPACE.block_size) + 1

        async def report(sequence: int) -> None:
            for node, num_free_blocks in ((nodes.decodes[0], num_new_blocks), (nodes.decodes[1], 0)):
                load = node_pb2.NodeLoad(num_blocks=1000, num_free_blocks=num_free_blocks, num_leases=sequence)
                node.updates.put_nowait(node_pb2.WatchResponse(epoch=1, sequence=sequence, load=load))
            await until(lambda: all(node.load.num_leases == sequence for node in (roomy, full)))

        def chosen() -> NodeHandle:
            return nodes.placer.place(NODE_REQUEST, lost=set(), last_resort=False).decode.node

        await report(1)
        assert (chosen(), chosen()) == (roomy, full)
        for sequence in (2, 3):  # in a row, so that it is not this node's turn alone
            await report(sequence)
            assert chosen() is roomy


@pytest.mark.parametrize("table", ["", "shared"])
async def test_a_prompt_that_is_computed_on_lent_cores_yields_to_decodes(table: str) -> None:
    async with cluster(local_prefill_max_tokens=4, core_table=table) as nodes:
        message = node_pb2.NodeLoad(num_blocks=1000, num_free_blocks=1000, num_requests_decoding=2)
        nodes.decode.updates.put_nowait(node_pb2.WatchResponse(epoch=1, sequence=1, load=message))
        await until(lambda: nodes.registry.decode[0].load.num_requests_decoding == 2)
        request = RoutedRequest("r", PROMPT, SamplingParams(seed=1), NAMESPACE, timeout=60.0)
        async with aclosing(nodes.relay.run(request)) as events:
            first = asyncio.create_task(take(events))
            admit = await nodes.decode.admit()
            assert (admit.local_prefill, admit.yields_to_decodes) == (bool(table), bool(table))
            await give_up(first)


async def test_a_decode_node_need_not_compute_what_it_holds_nor_have_room_for_it() -> None:
    async with decode_node_holds_the_prompt() as nodes:
        placement = nodes.placer.place(NODE_REQUEST, lost=set(), last_resort=False)
        assert placement.decode.num_uncached_tokens == 1
        assert placement.decode.node.num_claimed_blocks == 1, "for the output"


async def test_a_node_that_was_lost_is_no_last_resort_while_another_lives() -> None:
    async with cluster(num_decode_nodes=2) as nodes:
        lost, other = nodes.registry.decode
        other.num_sequences = 100
        assert lost.description is not None
        for last_resort in (True, False):
            placement = nodes.placer.place(NODE_REQUEST, lost={lost.description.source}, last_resort=last_resort)
            assert placement.decode.node is other
        other.num_sequences = 0


async def test_an_ejected_node_is_used_when_no_other_is_left_that_was_not_lost() -> None:
    async with cluster(num_decode_nodes=2) as nodes:
        lost, ejected = nodes.registry.decode
        for _ in range(5):
            ejected.outlier.failed(UnavailableError("out of luck"))
        assert nodes.registry.live(NodeRole.DECODE) == [lost]
        for last_resort in (False, True):
            placement = nodes.placer.place(NODE_REQUEST, lost={lost.source}, last_resort=last_resort)
            assert placement.decode.node is ejected


async def test_an_ejected_prefill_node_gets_no_refill_of_a_lost_one() -> None:
    """Without one, the prompt is computed where it is decoded, at once."""
    async with cluster(num_prefill_nodes=2) as nodes:
        lost, ejected = nodes.registry.prefill
        for _ in range(5):
            ejected.outlier.failed(UnavailableError("out of luck"))
        [reader] = nodes.registry.decode
        assert nodes.placer.refill(NODE_REQUEST, lost={lost.source}, reader=reader, num_missing_tokens=10) is None


async def test_a_refill_takes_no_nodes_turn() -> None:
    """Otherwise one of two nodes, whose blocks do not arrive, would get all requests, since each has a refill."""
    async with cluster(num_prefill_nodes=2) as nodes:
        chosen = []
        for _ in range(4):
            placement = nodes.placer.place(NODE_REQUEST, lost=set(), last_resort=False)
            assert placement.prefill is not None
            refill = nodes.placer.refill(
                NODE_REQUEST,
                lost={placement.prefill.source},
                reader=placement.decode.node,
                num_missing_tokens=10,
            )
            assert refill is not None and refill.node is not placement.prefill.node
            chosen.append(placement.prefill.source.node_id)
        assert chosen == ["prefill-0", "prefill-1"] * 2


async def test_blocks_of_another_salt_are_not_found() -> None:
    async with decode_node_holds_the_prompt() as nodes:
        request = RoutedRequest("r", PROMPT, SamplingParams(seed=1), NAMESPACE, timeout=60.0, cache_salt=b"tenant")
        asked = await prefill_request(nodes, request)
        assert not asked.sources and asked.cache_salt == b"tenant"


async def test_prompt_logprobs_need_the_whole_prompt_computed() -> None:
    async with decode_node_holds_the_prompt() as nodes:
        request = RoutedRequest("r", PROMPT, SamplingParams(seed=1, prompt_logprobs=0), NAMESPACE, timeout=60.0)
        assert not (await prefill_request(nodes, request)).sources
