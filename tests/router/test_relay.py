"""From a request to its placement: what nodes are told follows from what they hold."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from kvrelay.core.block_hash import block_hashes
from kvrelay.core.errors import UnavailableError
from kvrelay.core.sampling_params import SamplingParams
from kvrelay.v1 import prefill_node_pb2
from router.nodes.node import NodeState
from router.request import RoutedRequest
from tests.router.scripted_nodes import BLOCK_SIZE, NAMESPACE, PATIENCE, Cluster, cluster, soon

PROMPT = tuple(range(200, 210))  # two full blocks and a partial one


@asynccontextmanager
async def decode_node_holds_the_prompt() -> AsyncIterator[Cluster]:
    async with cluster() as nodes:
        held = list(block_hashes(NAMESPACE.root(), PROMPT, BLOCK_SIZE, include_partial=True))
        nodes.decode.update(1, stored=held)
        async with asyncio.timeout(PATIENCE):
            while nodes.registry.index.leading(held) != {"decode-0": 3}:
                await asyncio.sleep(0.005)
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
        request = RoutedRequest("r", PROMPT, SamplingParams(seed=1), timeout=60.0, priority=-3)
        asked = await prefill_request(nodes, request)
        [source] = asked.sources
        assert (source.source.node_id, source.source.endpoint, source.num_blocks) == (
            "decode-0",
            "endpoint-decode-0",
            2,
        )
        assert (asked.priority, tuple(asked.prompt_token_ids)) == (-3, PROMPT)


async def test_blocks_of_another_salt_are_not_found() -> None:
    async with decode_node_holds_the_prompt() as nodes:
        request = RoutedRequest("r", PROMPT, SamplingParams(seed=1), timeout=60.0, cache_salt=b"tenant")
        asked = await prefill_request(nodes, request)
        assert not asked.sources and asked.cache_salt == b"tenant"


async def test_prompt_logprobs_need_the_whole_prompt_computed() -> None:
    async with decode_node_holds_the_prompt() as nodes:
        request = RoutedRequest("r", PROMPT, SamplingParams(seed=1, prompt_logprobs=0), timeout=60.0)
        assert not (await prefill_request(nodes, request)).sources


async def test_nothing_is_served_without_a_decode_node() -> None:
    async with cluster() as nodes:
        assert nodes.relay.served_model().kv_namespace == NAMESPACE
        await nodes.decode.stop()
        async with asyncio.timeout(PATIENCE):
            while nodes.registry.decode[0].state is NodeState.LIVE:
                await asyncio.sleep(0.005)
        with pytest.raises(UnavailableError):
            nodes.relay.served_model()
        with pytest.raises(UnavailableError):
            await anext(nodes.relay.run(RoutedRequest("r", PROMPT, SamplingParams(seed=1), timeout=60.0)))
