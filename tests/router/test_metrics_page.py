"""What a router serves at `/metrics`: docs/metrics.md names it, and nothing else, and requests are counted there."""

import asyncio
import re
from pathlib import Path

import httpx

from kvrelay.text.tokenizer import Tokenizer
from router.app import serve
from router.settings import RouterSettings
from tests.router.edge.edge_parts import MODEL, ScriptedRelay
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
