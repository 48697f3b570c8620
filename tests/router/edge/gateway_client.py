"""A running HTTP gateway, and the clients with which tests talk to it."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from router.edge.gateway import create_app
from tests.router.edge.edge_parts import MODEL, ScriptedRelay, http_server, make_edge

REPLY = "Paris is the capital of France"
COMPLETION = {"model": MODEL, "prompt": "The capital", "max_tokens": 50}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}


@dataclass(frozen=True)
class Gateway:
    port: int
    relay: ScriptedRelay
    http: httpx.AsyncClient
    openai: openai.AsyncOpenAI

    async def post(self, path: str, body: object) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def events(self, path: str, body: dict[str, object]) -> list[Any]:
        """Returns the decoded events of a streamed answer, after checking that they are well-formed; `[DONE]` is
        None."""
        response = await self.http.post(path, json=body | {"stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        *events, end = response.text.split("\n\n")
        assert end == ""
        assert all(event.startswith("data: ") for event in events)
        data = [event.removeprefix("data: ") for event in events]
        return [None if event == "[DONE]" else json.loads(event) for event in data]


@asynccontextmanager
async def serving(relay: ScriptedRelay) -> AsyncIterator[Gateway]:
    async with http_server(create_app(make_edge(relay), version="1.2.3", max_body_bytes=1 << 20)) as port:
        url = f"http://127.0.0.1:{port}"
        async with (
            httpx.AsyncClient(base_url=url, timeout=20) as http,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):
            yield Gateway(port, relay, http, client)
