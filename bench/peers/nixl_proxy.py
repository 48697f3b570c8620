"""The proxy that vllm's NIXL connector needs: the prompt to the prefill server with one token to make, then the
request with the KV's address to the decode server, whose stream is passed on as it comes.

    python -m bench.peers.nixl_proxy PORT PREFILL_URL DECODE_URL
"""

import sys
from collections.abc import AsyncIterator

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


class Proxy:
    def __init__(self, prefill: str, decode: str) -> None:
        self._prefill = prefill
        self._decode = decode
        self._session: aiohttp.ClientSession | None = None

    async def session(self, app: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as self._session:
            yield

    async def models(self, request: web.Request) -> web.Response:
        assert self._session is not None
        async with self._session.get(f"{self._decode}/v1/models") as response:
            return web.Response(body=await response.read(), content_type="application/json", status=response.status)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        assert self._session is not None
        body = await request.json()
        first = {name: value for name, value in body.items() if name != "stream_options"}
        first |= {"stream": False, "max_tokens": 1, "kv_transfer_params": _REMOTE_DECODE}
        async with self._session.post(self._prefill + request.path, json=first) as response:
            if response.status != 200:
                return web.Response(body=await response.read(), status=response.status)
            transfer = (await response.json())["kv_transfer_params"]
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        async with self._session.post(
            self._decode + request.path, json=body | {"kv_transfer_params": transfer}
        ) as response:
            answer.set_status(response.status)
            await answer.prepare(request)
            async for data in response.content.iter_any():
                await answer.write(data)
        await answer.write_eof()
        return answer


def main() -> None:
    proxy = Proxy(sys.argv[2], sys.argv[3])
    app = web.Application(client_max_size=_MAX_BODY_BYTES)
    app.cleanup_ctx.append(proxy.session)
    app.router.add_get("/v1/models", proxy.models)
    app.router.add_post("/v1/completions", proxy.generate)
    app.router.add_post("/v1/chat/completions", proxy.generate)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)


if __name__ == "__main__":
    main()
