"""A request that goes through the relay to scripted nodes, and the events it brings."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from kvrelay.core.generation.outputs import FinishReason, TokenOutput
from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.v1 import common_pb2
from router.request import RequestEvent, RequestTrace, RoutedRequest
from tests.router.scripted_cluster import Cluster
from tests.router.scripted_nodes import NAMESPACE, PATIENCE, PrefillCall, ScriptedDecode, soon, token

PROMPT = tuple(range(100, 110))  # two full blocks and a partial one
LAST = token(8, finish=FinishReason.LENGTH)


def a_request(request_id: str = "r", *, n: int = 1, timeout: float = 60.0) -> RoutedRequest:
    return RoutedRequest(request_id, PROMPT, SamplingParams(n=n, max_tokens=8, seed=1), NAMESPACE, timeout=timeout)


async def take(events: AsyncGenerator[RequestEvent, None]) -> RequestEvent:
    async with asyncio.timeout(PATIENCE):
        return await anext(events)


async def collected(nodes: Cluster, request: RoutedRequest) -> list[RequestEvent]:
    async with aclosing(nodes.relay.run(request)) as events:
        return [event async for event in events]


async def take_trace(events: AsyncGenerator[RequestEvent, None]) -> RequestTrace:
    trace = await take(events)
    assert isinstance(trace, RequestTrace)
    with pytest.raises(StopAsyncIteration):
        await take(events)
    return trace


async def opened(
    nodes: Cluster, events: AsyncGenerator[RequestEvent, None]
) -> "tuple[asyncio.Task[RequestEvent], PrefillCall, str]":
    """Returns once both nodes have the request and the prefill node has granted a lease: the task that waits for the
    first event, its prefill there, and the request's name at the nodes."""
    first = asyncio.create_task(take(events))
    call = await soon(nodes.prefill.calls)
    admit = await nodes.decode.admit()
    assert not admit.local_prefill and tuple(admit.prompt_token_ids) == PROMPT
    assert call.request.request_id == admit.request_id
    call.accept()
    return first, call, admit.request_id


def fetched(*origins: tuple[str, int], **in_vain: int) -> common_pb2.FetchReport:
    """Returns a report of so many blocks from each of these nodes."""
    blocks = [common_pb2.FetchedBlocks(node_id=node_id, num_blocks=count) for node_id, count in origins]
    return common_pb2.FetchReport(fetched=blocks, **in_vain)


async def give_up(task: "asyncio.Task[Any]") -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def expire(nodes: Cluster, request_id: str = "r") -> None:
    """Has the time of a request be over now. However long it takes to come this far, it was not over before."""
    deadline = nodes.relay._running[request_id]._deadline
    assert deadline is not None and 0 < deadline.when() - asyncio.get_running_loop().time() <= 60.0
    deadline._run()


def assert_idle(nodes: Cluster) -> None:
    for node in nodes.registry.nodes:
        assert (node.num_queued_tokens, len(node.coming), node.num_sequences) == (0, 0, 0)


def say(node: ScriptedDecode, request_id: str, *outputs: TokenOutput) -> None:
    """Lets the node send these tokens."""
    for output in outputs:
        node.tokens(request_id, output)


async def begun(
    nodes: Cluster, events: AsyncGenerator[RequestEvent, None], *first_tokens: TokenOutput
) -> tuple[PrefillCall, str]:
    """Returns once the client has the first tokens, everything is published, and decode-0 has its KV."""
    first, call, wire_id = await opened(nodes, events)
    call.finish(*first_tokens)
    call.end()
    assert await first == first_tokens[0]
    for output in first_tokens[1:]:
        assert await take(events) == output
    await nodes.decode.started()
    nodes.decode.kv_ready(wire_id, fetched=10)
    return call, wire_id
