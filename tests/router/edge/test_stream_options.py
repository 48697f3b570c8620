"""What a client may wish of a stream's usage."""

from typing import Any

import pytest

from tests.router.edge.gateway_client import CHAT, COMPLETION, Gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")  # one server for the whole file


async def test_a_null_in_the_stream_options_is_its_default(gateway: Gateway) -> None:
    events = await gateway.events("/v1/completions", {**COMPLETION, "stream_options": {"include_usage": None}})
    assert "usage" not in events[0]


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
async def test_vllms_continuous_usage_is_in_every_event(gateway: Gateway, path: str, body: dict[str, Any]) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, last, done = await gateway.events(path, {**body, "n": 2, "max_tokens": 6, "stream_options": options})
    assert done is None
    num_prompt_tokens = last["usage"]["prompt_tokens"]
    totals = [event["usage"]["completion_tokens"] for event in events]
    assert totals == sorted(totals) and set(totals) == set(range(1, 13)), "of both choices together"
    for event, total in zip(events, totals, strict=True):
        assert event["choices"]
        assert event["usage"] == {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": total,
            "total_tokens": num_prompt_tokens + total,
        }
    assert last["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("include_usage", [None, False])
async def test_there_is_no_continuous_usage_without_one_at_the_end(
    gateway: Gateway, include_usage: bool | None
) -> None:
    options = {"include_usage": include_usage, "continuous_usage_stats": True}
    events = await gateway.events("/v1/completions", {**COMPLETION, "stream_options": options})
    assert all("usage" not in event for event in events if event is not None)
