"""When requests go out and how many run at a time, seen from the router's own gateway over a scripted relay."""

import asyncio
import itertools
import json
import math
import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvrelay.bench.arrivals import gamma_arrivals
from kvrelay.bench.base import Segment
from kvrelay.bench.load import MAX_READY
from kvrelay.bench.measure import measure
from kvrelay.bench.prompts import PromptBuilder
from kvrelay.bench.result import RunResult
from kvrelay.bench.settings import ServeBenchSettings, SweepBenchSettings
from router.request import RequestEvent, RoutedRequest
from tests.bench.servers import gateway
from tests.router.conftest import relay, tokenizer, tokenizer_directory
from tests.router.edge.edge_parts import ScriptedRelay

__all__ = ["relay", "tokenizer", "tokenizer_directory"]  # fixtures

ANSWERED: dict[str, Any] = {"vocab_size": 258, "warmup": 0, "progress": "off"}
SMALL: dict[str, Any] = {"output_len": "4", "input_len": "8-16", **ANSWERED}


@pytest.fixture
async def url(relay: ScriptedRelay) -> AsyncIterator[str]:
    async with gateway(relay) as found:
        yield found


async def test_a_trace_is_replayed_at_its_times(url: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": timestamp, "input_length": 8, "output_length": 2, "hash_ids": [number]}
        for number, timestamp in enumerate([5000, 5400, 5200, 5600])
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, [result] = await measure(ServeBenchSettings(url=url, workload="trace", trace=trace, speedup=2.0, **ANSWERED))
    assert scheduled(result) == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert_nothing_is_sent_early(result)


async def test_a_trace_may_be_a_pipe(url: str) -> None:
    """Such as that of `--trace <(zcat trace.gz)`, which can be read once."""
    reading, writing = os.pipe()
    os.write(writing, json.dumps({"timestamp": 0, "input_length": 8, "output_length": 2, "hash_ids": [1]}).encode())
    os.close(writing)
    settings = ServeBenchSettings(
        url=url, workload="trace", trace=Path(f"/dev/fd/{reading}"), **ANSWERED | {"warmup": 2}
    )
    _, [result] = await measure(settings)
    os.close(reading)
    assert (result.summary.num_completed, result.summary.output_tokens) == (1, 2)


async def test_requests_arrive_at_the_rate_and_the_burstiness(url: str) -> None:
    settings = ServeBenchSettings(url=url, request_rate=20.0, burstiness=0.5, requests=5, seed=3, **SMALL)
    _, [result] = await measure(settings)
    assert scheduled(result) == list(itertools.islice(gamma_arrivals(20.0, burstiness=0.5, seed=3), 5))
    assert_nothing_is_sent_early(result)


async def test_the_burstiness_reaches_the_loads_of_a_sweep(url: str) -> None:
    settings = SweepBenchSettings(url=url, request_rates=(50.0, 100.0), burstiness=4.0, requests=3, **SMALL)
    _, results = await measure(settings)
    for rate, result in zip(settings.request_rates, results, strict=True):
        assert scheduled(result) == list(itertools.islice(gamma_arrivals(rate, burstiness=4.0, seed=0), 3))
        assert_nothing_is_sent_early(result)


@dataclass
class CrowdedRelay(ScriptedRelay):
    """A relay that answers nobody before `crowd` requests run. `most_running` is the greatest number that ever did."""

    crowd: int = 1
    most_running: int = 0

    def __post_init__(self) -> None:
        self._barrier = asyncio.Barrier(self.crowd)

    async def run(self, request: RoutedRequest) -> AsyncGenerator[RequestEvent, None]:
        events = super().run(request)
        first = await anext(events)
        self.most_running = max(self.most_running, self.num_running)
        await self._barrier.wait()
        yield first
        async for event in events:
            yield event


@pytest.mark.parametrize("crowd", [3, 101])
async def test_as_many_requests_run_as_the_concurrency_allows(crowd: int, relay: ScriptedRelay) -> None:
    crowded = CrowdedRelay(relay.tokenizer, crowd=crowd)
    settings: dict[str, Any] = {"concurrency": crowd, "requests": 2 * crowd, "timeout": 20.0}
    async with gateway(crowded) as url:
        _, [result] = await measure(ServeBenchSettings(url=url, **settings, **SMALL))
    assert result.summary.failures == (), "with fewer at a time nobody would have been answered"
    assert crowded.most_running == crowd and result.limit_was_reached


async def test_drawing_prompts_before_the_load_is_no_part_of_what_it_takes(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Segment] = []
    pieces = PromptBuilder.pieces

    def drawing(builder: PromptBuilder, segments: Sequence[Segment]) -> Iterator[list[int]]:
        drawn.extend(segments)
        return pieces(builder, segments)

    monkeypatch.setattr(PromptBuilder, "pieces", drawing)
    monkeypatch.setattr("time.process_time", lambda: float(len(drawn)))  # nothing else takes any
    _, [at_once] = await measure(ServeBenchSettings(url=url, request_rate=math.inf, requests=40, **SMALL))
    _, [in_turn] = await measure(ServeBenchSettings(url=url, concurrency=2, requests=40, **SMALL))
    assert len(drawn) == 80 and (at_once.client_cpu_seconds, in_turn.client_cpu_seconds) == (0.0, 40.0 - MAX_READY)


async def test_the_first_request_of_a_prefix_is_told_from_later_ones(url: str) -> None:
    settings = ServeBenchSettings(
        url=url, workload="shared-prefix", num_prefixes=2, prefix_len=32, requests=6, concurrency=1, **SMALL
    )
    _, [result] = await measure(settings)
    assert {kind: summary.num_completed for kind, summary in result.by_kind.items()} == {"first": 2, "later": 4}


async def test_a_conversation_pauses_for_its_think_time(url: str) -> None:
    settings = ServeBenchSettings(
        url=url, workload="multi-turn", turns=3, think_time=0.05, requests=2, concurrency=1, **SMALL
    )
    _, [result] = await measure(settings)
    conversations = [result.records[:3], result.records[3:]]
    for earlier, later in (pair for turns in conversations for pair in itertools.pairwise(turns)):
        assert later.sent - earlier.finished >= 0.05 - 1e-9
        assert later.sent >= later.scheduled, "the pause is the user's, not the client's delay"


def scheduled(result: RunResult) -> list[float]:
    return sorted(record.scheduled for record in result.records)


def assert_nothing_is_sent_early(result: RunResult) -> None:
    assert all(record.sent >= record.scheduled for record in result.records), result.records
