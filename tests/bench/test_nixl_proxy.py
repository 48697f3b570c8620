"""The proxy in front of vllm's NIXL servers, over two servers that answer as told."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from bench.peers.nixl_proxy import make_app
from tests.bench.servers import DONE, LAST, PIECE, answering

TRANSFER = {"remote_engine_id": "e", "remote_block_ids": [1, 2]}
PREFILLED = [json.dumps({"choices": [], "kv_transfer_params": TRANSFER}).encode()]
REQUEST = {"prompt": [1, 2], "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True}}


@asynccontextmanager
async def proxy(
    prefill: str, decode: str, *, silence_seconds: float = 60.0
) -> AsyncIterator["TestClient[web.Request, web.Application]"]:
    app = make_app(prefill, decode, silence_seconds=silence_seconds)
    async with TestClient(TestServer(app)) as client:
        yield client


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_request_goes_to_one_after_the_other(path: str) -> None:
    asked: list[dict[str, Any]] = []
    decoded: list[dict[str, Any]] = []
    async with answering(PREFILLED, bodies=asked) as prefill, answering([PIECE, LAST, DONE], bodies=decoded) as decode:
        async with proxy(prefill, decode) as client, client.post(path, json=REQUEST) as response:
            assert (response.status, response.content_type) == (200, "text/event-stream")
            assert await response.read() == PIECE + LAST + DONE
    [first], [second] = asked, decoded
    assert (first["prompt"], first["max_tokens"], first["stream"]) == ([1, 2], 1, False)
    assert first["kv_transfer_params"]["do_remote_decode"] and "stream_options" not in first
    assert second == REQUEST | {"kv_transfer_params": TRANSFER}


async def test_models_are_those_of_the_decode_server() -> None:
    async with answering() as prefill, answering(models=["m"]) as decode, proxy(prefill, decode) as client:
        async with client.get("/v1/models") as response:
            assert await response.json() == {"data": [{"id": "m"}]}


@pytest.mark.parametrize(
    ("pieces", "status", "message"),
    [
        ([b"full"], 503, "the prefill server: ValueError: status 503: full"),
        ([b"{}"], 200, "the prefill server: KeyError: 'kv_transfer_params'"),
    ],
)
async def test_what_the_prefill_server_refuses_is_told(pieces: list[bytes], status: int, message: str) -> None:
    async with answering(pieces, status=status) as prefill, answering() as decode, proxy(prefill, decode) as client:
        async with client.post("/v1/completions", json=REQUEST) as response:
            assert (response.status, (await response.json())["error"]["message"]) == (502, message)


async def test_servers_that_say_nothing_are_given_up() -> None:
    connected: list[asyncio.StreamWriter] = []

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.append(writer)

    silent = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    async with answering(PREFILLED) as prefill:
        for name, first, second in (("prefill", url, prefill), ("decode", prefill, url)):
            for seconds in (0.1, 1.0, 10.0):  # until the other server, too, is fast enough
                async with proxy(first, second, silence_seconds=seconds) as client:
                    async with client.post("/v1/completions", json=REQUEST) as response:
                        assert response.status == 502
                        message = (await response.json())["error"]["message"]
                if name in message:
                    break
            assert f"the {name} server: SocketTimeoutError" in message
    for writer in connected:
        writer.close()
    silent.close()
    await silent.wait_closed()
