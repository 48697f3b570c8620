"""A node dies in the middle of a stop string, and the text ends where it would have ended."""

import asyncio
import threading
from contextlib import aclosing

from prometheus_client import CollectorRegistry

from kvrelay.core.clock import MonotonicClock
from kvrelay.core.generation.outputs import FinishReason
from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.text.choice import TextChunk
from kvrelay.text.tokenizer import Tokenizer
from router.edge.edge import Edge
from router.edge.metrics import RouterMetrics
from router.policies.choice import make_policy
from router.request import RequestTrace, RoutedRequest
from tests.cluster.cluster import Cluster, cluster
from tests.demo_model import DEMO_MODEL

FIRST, KILL, LAST = 14, 15, 22  # tokens: the stop string is the text between the first and the last of these


async def test_a_stop_string_that_spans_the_break_is_found() -> None:
    tokenizer = Tokenizer.load(str(DEMO_MODEL))
    prompt = tuple(await tokenizer.encode("Once upon a time", add_special_tokens=True))

    async def generate(running: Cluster, stop: tuple[str, ...], *, kill: bool) -> tuple[list[TextChunk], RequestTrace]:
        gate = running.hold("decode-0", num_tokens=KILL) if kill else None
        metrics = RouterMetrics("demo", CollectorRegistry())
        edge = Edge(running.relay, tokenizer, "demo", metrics, MonotonicClock(), default_timeout=60.0)
        sampling = SamplingParams(max_tokens=60, temperature=0.0, seed=0, ignore_eos=True, stop=stop)
        chunks: list[TextChunk] = []
        traces: list[RequestTrace] = []
        killing: list[asyncio.Task[None]] = []
        request = RoutedRequest("r", prompt, sampling, running.kv_namespace, timeout=60.0)
        async with aclosing(edge.generate(request)) as events:
            async for event in events:
                if isinstance(event, TextChunk):
                    chunks.append(event)
                    if gate and not killing and num_tokens(chunks) >= KILL:
                        killing.append(asyncio.create_task(kill_decode_node(running, gate)))
                elif isinstance(event, RequestTrace):
                    traces.append(event)
        await asyncio.gather(*killing)
        [trace] = traces
        return chunks, trace

    policy = make_policy("round_robin", local_prefill_max_tokens=0)
    async with cluster(DEMO_MODEL, decode_nodes=2, policy=policy) as running:
        chunks, trace = await generate(running, (), kill=False)
        token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
        whole = text_of(chunks)
        start = len(tokenizer.decode(token_ids[:FIRST], skip_special_tokens=True))
        end = len(tokenizer.decode(token_ids[:LAST], skip_special_tokens=True))
        assert whole.find(whole[start:end]) == start
        assert trace.decode_node == "decode-0"
        await running.generate(prompt, max_tokens=1)  # the next turn is decode-0's again
        chunks, trace = await generate(running, (whole[start:end],), kill=True)
    assert text_of(chunks) == whole[:start]
    assert chunks[-1].finish_reason is FinishReason.STOP and chunks[-1].stop_reason == whole[start:end]
    assert trace.num_migrations == 1


async def kill_decode_node(running: Cluster, gate: threading.Event) -> None:
    await running.kill("decode-0")
    gate.set()


def num_tokens(chunks: list[TextChunk]) -> int:
    return sum(len(chunk.token_ids) for chunk in chunks)


def text_of(chunks: list[TextChunk]) -> str:
    return "".join(chunk.text for chunk in chunks)
