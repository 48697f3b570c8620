"""What a router serves at `/metrics`: docs/metrics.md names it, and nothing else, and requests are counted there."""

import asyncio
import re
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import httpx
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from kvrelay.text.tokenizer import Tokenizer
from router.app import serve
from router.edge.gateway import create_app
from router.settings import RouterSettings
from tests.router.edge.edge_parts import MODEL, ScriptedRelay, http_server, make_edge
from tests.router.edge.gateway_client import CHAT, COMPLETION, REPLY, serving
from tests.router.scripted_nodes import PATIENCE

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


async def test_the_page_names_every_family_and_no_other(tokenizer_directory: Path) -> None:
    """A family is served from the start, before it has a sample."""
    settings = RouterSettings(
        model=str(tokenizer_directory), decode_nodes=("127.0.0.1:1",), port=0, grpc_port=0, start_timeout=0.0
    )
    async with serve(settings, asyncio.Event(), asyncio.Event()) as addresses:
        async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE) as client:
            scraped = (await client.get(f"http://{addresses.http}/metrics")).text
    families = set(re.findall(r"^# TYPE (\S+)", scraped, re.MULTILINE))
    named = set(re.findall(r"(?:kvrelay:|process_)\w+", PAGE.read_text(encoding="utf-8")))
    assert named == {name for name in families if not name.endswith("_created")}


async def test_metrics_count_requests_by_ending_tokens_and_latencies(tokenizer: Tokenizer) -> None:
    async with serving(ScriptedRelay(tokenizer)) as gateway:
        await gateway.post("/v1/completions", COMPLETION)
        await gateway.post("/v1/completions", COMPLETION | {"max_tokens": 2})
        await gateway.post("/v1/completions", COMPLETION | {"max_tokens": 0})
        await gateway.post("/v1/chat/completions", CHAT | {"tools": [{}]})
        text = (await gateway.http.get("/metrics")).text
    num_prompt_tokens = len(await tokenizer.encode("The capital", add_special_tokens=True))
    num_reply_tokens = len(await tokenizer.encode(REPLY, add_special_tokens=False)) + 1
    label = f'model_name="{MODEL}"'
    for line in (
        f'kvrelay:request_success_total{{finished_reason="stop",{label}}} 1.0',
        f'kvrelay:request_success_total{{finished_reason="length",{label}}} 1.0',
        f'kvrelay:request_success_total{{finished_reason="abort",{label}}} 0.0',
        f'kvrelay:request_errors_total{{code="INVALID_ARGUMENT",{label}}} 2.0',
        f"kvrelay:prompt_tokens_total{{{label}}} {2 * num_prompt_tokens}.0",
        f"kvrelay:generation_tokens_total{{{label}}} {num_reply_tokens + 2}.0",
        f"kvrelay:prompt_tokens_cached_total{{{label}}} 4.0",
        f"kvrelay:num_requests_running{{{label}}} 0.0",
        f"kvrelay:time_to_first_token_seconds_count{{{label}}} 2.0",
        f"kvrelay:e2e_request_latency_seconds_count{{{label}}} 2.0",
        f"kvrelay:inter_token_latency_seconds_count{{{label}}} {num_reply_tokens}.0",
    ):
        assert line in text


async def test_the_ways_in_which_a_request_may_end_are_counted_from_zero(tokenizer: Tokenizer) -> None:
    """A rate or an increase misses an event with which its series begins."""
    async with serving(ScriptedRelay(tokenizer)) as gateway:
        text = (await gateway.http.get("/metrics")).text
    label = f'model_name="{MODEL}"'
    for reason in ("stop", "length", "abort"):
        assert f'kvrelay:request_success_total{{finished_reason="{reason}",{label}}} 0.0' in text
    codes = ("INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "CANCELLED", "INTERNAL", "UNAVAILABLE")
    for code in (*codes, "DEADLINE_EXCEEDED"):
        assert f'kvrelay:request_errors_total{{code="{code}",{label}}} 0.0' in text


def test_the_slowest_requests_that_the_defaults_allow_are_in_a_bucket(tokenizer: Tokenizer) -> None:
    """Of those beyond the last bucket, no quantile is known."""
    registry = make_edge(ScriptedRelay(tokenizer)).metrics.registry
    bounds = {
        family.name: max(float(le) for sample in family.samples if (le := sample.labels.get("le", "+Inf")) != "+Inf")
        for family in registry.collect()
        if family.type == "histogram"
    }
    settings = RouterSettings.model_fields
    assert bounds["kvrelay:time_to_first_token_seconds"] >= settings["request_timeout"].default
    assert bounds["kvrelay:e2e_request_latency_seconds"] >= settings["request_timeout"].default
    assert bounds["kvrelay:inter_token_latency_seconds"] >= settings["node_wait"].default


class HeldSamples(list[Sample]):
    """Samples whose text is made once the router has `answered` something else."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        super().__init__(samples)
        self.are_written = threading.Event()
        self.answered = threading.Event()

    def __iter__(self) -> Iterator[Sample]:
        self.are_written.set()
        assert self.answered.wait(PATIENCE), "the event loop waits for them"
        return super().__iter__()


class HeldCollector(Collector):
    def __init__(self) -> None:
        family = GaugeMetricFamily("held", "A family that takes long to write.", value=7)
        self.samples = family.samples = HeldSamples(family.samples)
        self.collected_in: list[threading.Thread] = []
        self._family = family

    def collect(self) -> Iterable[Metric]:
        self.collected_in.append(threading.current_thread())
        yield self._family


async def test_while_the_page_is_written_others_are_answered(tokenizer: Tokenizer) -> None:
    """For a hundred nodes that takes long. What the page says is collected where it changes: on the event loop."""
    edge, held = make_edge(ScriptedRelay(tokenizer)), HeldCollector()
    edge.metrics.registry.register(held)
    async with http_server(create_app(edge, version="1.2.3", max_body_bytes=1 << 20)) as port:
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=PATIENCE) as client:
            scraping = asyncio.create_task(client.get("/metrics"))
            assert await asyncio.to_thread(held.samples.are_written.wait, PATIENCE)
            assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200
            held.samples.answered.set()
            page = (await scraping).text
    assert held.collected_in == [threading.current_thread()]
    assert "held 7.0" in page and f'kvrelay:prompt_tokens_total{{model_name="{MODEL}"}} 0.0' in page
