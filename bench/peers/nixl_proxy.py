"""The proxy that vllm's NIXL connector needs. It sends a request to the prefill server, which makes one token, and then
with the address of the KV to the decode server, whose stream it passes on as it comes.

    python -m bench.peers.nixl_proxy PORT PREFILL_URL DECODE_URL
"""

import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from aiohttp import web

_REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_MAX_BODY_BYTES = 64 << 20
SILENCE_SECONDS = 600.0  # that a server may say nothing: a client of kvrelay bench waits no longer either


class Proxy:
    """One prefill and one decode server, by their URLs. Whatever fails at a server before its stream begins is answered
    with status 502 and what it said; later the stream breaks off."""

    def __init__(self, prefill: str, decode: str, *, silence_seconds: float) -> None:
        self._prefill = prefill
        self._decode = decode
        self._silence_seconds = silence_seconds
        self._session: aiohttp.ClientSession | None = None

    async def session(self, app: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, connect=self._silence_seconds, sock_read=self._silence_seconds)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as self._session:
            yield

    async def models(self, request: web.Request) -> web.Response:
        assert self._session is not None
        async with self._session.get(f"{self._decode}/v1/models") as response:
            return web.Response(body=await response.read(), content_type="application/json", status=response.status)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        try:
            transfer = await self._prefilled(request.path, body)
        except (aiohttp.ClientError, TimeoutError, KeyError, ValueError) as error:
            return _failed(f"the prefill server: {type(error).__name__}: {error}")
        return await self._decoded(request, body | {"kv_transfer_params": transfer})

    async def _prefilled(self, path: str, body: dict[str, Any]) -> object:
        """Returns what the decode server has to know to fetch the KV."""
        assert self._session is not None
        first = {name: value for name, value in body.items() if name != "stream_options"}
        first |= {"stream": False, "max_tokens": 1, "kv_transfer_params": _REMOTE_DECODE}
        async with self._session.post(self._prefill + path, json=first) as response:
            text = await response.text()
            if response.status != 200:
                raise ValueError(f"status {response.status}: {text}")
        return json.loads(text)["kv_transfer_params"]

    async def _decoded(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        assert self._session is not None
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            async with self._session.post(self._decode + request.path, json=body) as response:
                answer.set_status(response.status)
                await answer.prepare(request)
                async for data in response.content.iter_any():
                    await answer.write(data)
        except (aiohttp.ClientError, TimeoutError) as error:
            if answer.prepared:
                raise
            return _failed(f"the decode server: {type(error).__name__}: {error}")
        await answer.write_eof()
        return answer


def _failed(message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=502)


def make_app(prefill: str, decode: str, *, silence_seconds: float = SILENCE_SECONDS) -> web.Application:
    """Returns the proxy's application. A server that says nothing for `silence_seconds` has failed."""
    proxy = Proxy(prefill, decode, silence_seconds=silence_seconds)
    app = web.Application(client_max_size=_MAX_BODY_BYTES)
    app.cleanup_ctx.append(proxy.session)
    app.router.add_get("/v1/models", proxy.models)
    app.router.add_post("/v1/completions", proxy.generate)
    app.router.add_post("/v1/chat/completions", proxy.generate)
    return app


def main() -> None:
    web.run_app(make_app(sys.argv[2], sys.argv[3]), host="127.0.0.1", port=int(sys.argv[1]), print=None)


if __name__ == "__main__":
    main()
