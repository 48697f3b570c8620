"""Scripts of web pages that call the gateway from a browser: only those of allowed origins may read answers."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from kvrelay.core.errors import DeadlineError, KVRelayError, OverloadedError
from router.edge.gateway import create_app
from router.settings import RouterSettings
from tests.router.edge.edge_parts import ScriptedRelay, http_server, make_edge
from tests.router.edge.gateway_client import COMPLETION

PAGE = "https://chat.example.com"
OTHER = "https://other.example.com"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


@asynccontextmanager
async def served(relay: ScriptedRelay, origins: list[str]) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(make_edge(relay), version="1", max_body_bytes=1 << 20, allowed_origins=origins)
    async with http_server(app) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
        yield client


@pytest.mark.parametrize(
    ("origins", "expected"), [([PAGE], PAGE), ([OTHER, PAGE], PAGE), (["*"], "*"), ([OTHER], None), ([], None)]
)
async def test_only_pages_of_allowed_origins_may_call(
    origins: list[str], expected: str | None, relay: ScriptedRelay
) -> None:
    async with served(relay, origins) as http:
        preflight = await http.options("/v1/completions", headers=PREFLIGHT)
        assert preflight.is_success == (expected is not None)
        assert preflight.headers.get("access-control-allow-origin") == expected
        if expected is not None:
            assert "authorization" in preflight.headers["access-control-allow-headers"]
        answer = await http.post("/v1/completions", json=COMPLETION | {"stream": True}, headers={"origin": PAGE})
        assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
        assert answer.headers.get("access-control-allow-origin") == expected
        relay.fail_with = OverloadedError("busy")
        refused = await http.post("/v1/completions", json=COMPLETION, headers={"origin": PAGE})
        assert refused.status_code == 429  # whose reason the page may read as well
        assert refused.headers.get("access-control-allow-origin") == expected


@pytest.mark.parametrize(
    ("change", "reason"), [({"origin": OTHER}, "origin"), ({"access-control-request-method": "DELETE"}, "method")]
)
async def test_a_refused_preflight_is_an_error_as_all_others_are(
    change: dict[str, str], reason: str, relay: ScriptedRelay
) -> None:
    async with served(relay, [PAGE]) as http:
        refused = await http.options("/v1/completions", headers=PREFLIGHT | change)
    assert (refused.status_code, refused.headers["content-type"]) == (400, "application/json")
    error = refused.json()["error"]
    assert f"Disallowed CORS {reason}: " in error.pop("message")
    assert error == {"type": "invalid_request_error", "param": None, "code": None}
    assert refused.headers["access-control-allow-methods"] == "GET, POST"
    assert len(refused.headers.get_list("x-request-id")) == 1


async def test_a_page_that_may_not_call_cannot_send_a_prompt_without_asking(relay: ScriptedRelay) -> None:
    """Browsers ask first if a body is JSON by its type, but not if it has none."""
    body = json.dumps(COMPLETION)
    async with served(relay, []) as http:
        for origin in (PAGE, "null"):
            refused = await http.post("/v1/completions", content=body, headers={"origin": origin})
            assert refused.status_code == 415 and "application/json" in refused.json()["error"]["message"]
        assert relay.requests == []
        answer = await http.post("/v1/completions", content=body)
    assert "content-type" not in answer.request.headers and answer.status_code == 200


async def test_a_page_may_read_that_the_router_has_failed(relay: ScriptedRelay) -> None:
    relay.fail_with = RuntimeError("a defect")
    async with served(relay, [PAGE]) as http:
        failed = await http.post("/v1/completions", json=COMPLETION, headers={"origin": PAGE})
    assert (failed.status_code, failed.json()["error"]["message"]) == (500, "internal error")
    assert failed.headers["access-control-allow-origin"] == PAGE
    assert len(failed.headers.get_list("x-request-id")) == 1


@pytest.mark.parametrize("error", [OverloadedError("busy"), DeadlineError("late")])
async def test_a_page_may_read_whether_to_try_again(error: KVRelayError, relay: ScriptedRelay) -> None:
    """OpenAI's client in a browser would otherwise send again what would take as long again."""
    relay.fail_with = error
    async with served(relay, [PAGE]) as http:
        refused = await http.post("/v1/completions", json=COMPLETION, headers={"origin": PAGE})
    told = {"x-request-id", "retry-after", "x-should-retry"} & refused.headers.keys()
    assert len(told) == 2
    assert told <= set(refused.headers["access-control-expose-headers"].split(", "))


def test_origins_have_no_path() -> None:
    assert RouterSettings(allowed_origins=("http://localhost:3000", "*")).allowed_origins[1] == "*"
    for wrong in ("https://chat.example.com/", "chat.example.com", "null", "https://a b", ""):
        with pytest.raises(ValueError, match=r"must be \* or an origin such as"):
            RouterSettings(allowed_origins=(wrong,))
