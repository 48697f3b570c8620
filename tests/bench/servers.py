"""Real servers to benchmark: the router's own gateway and gRPC service over a scripted relay, and a server that answers
as it is told."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any

import grpc
from aiohttp import web

from kvrelay.core.rpc.calls import CallInterceptor
from kvrelay.core.rpc.connections import serve_insecure, server_options
from kvrelay.v1 import router_pb2_grpc
from router.edge.gateway import create_app
from router.edge.grpc_service import RouterService
from tests.router.edge.edge_parts import ScriptedRelay, http_server, make_edge

# Events of a streamed completion in OpenAI's API.
PIECE = b'data: {"choices":[{"index":0,"text":"x","finish_reason":null}]}\n\n'
LAST = b'data: {"choices":[{"index":0,"text":"","finish_reason":"length"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":5}}\n\n'
DONE = b"data: [DONE]\n\n"


@asynccontextmanager
async def gateway(relay: ScriptedRelay) -> AsyncIterator[str]:
    """Yields the URL of a gateway over HTTP."""
    async with http_server(create_app(make_edge(relay), version="test", max_body_bytes=1 << 20)) as port:
        yield f"http://127.0.0.1:{port}"


@asynccontextmanager
async def grpc_router(relay: ScriptedRelay) -> AsyncIterator[str]:
    """Yields the URL of a router over gRPC."""
    server = grpc.aio.server(interceptors=[CallInterceptor()], options=server_options())
    router_pb2_grpc.add_RouterServicer_to_server(RouterService(make_edge(relay)), server)
    port = await serve_insecure(server, "127.0.0.1", 0)
    yield f"grpc://127.0.0.1:{port}"
    await server.stop(None)


@asynccontextmanager
async def answering(
    pieces: Iterable[bytes] = (),
    *,
    status: int = 200,
    models: Sequence[str] = ("m",),
    models_status: int = 200,
    connections: set[object] | None = None,
    bodies: list[dict[str, Any]] | None = None,
    cookies: list[str | None] | None = None,
) -> AsyncIterator[str]:
    """Yields the URL of a server that sends these pieces to whoever asks for a completion, and notes connection, body
    and cookies of the request. It answers with a cookie, as load balancers do that keep a client on one server."""

    async def generate(request: web.Request) -> web.StreamResponse:
        if connections is not None:
            assert request.transport is not None
            connections.add(request.transport.get_extra_info("peername"))
        if bodies is not None:
            bodies.append(await request.json())
        if cookies is not None:
            cookies.append(request.headers.get("Cookie"))
        response = web.StreamResponse(status=status, headers={"Set-Cookie": "server=1"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        await response.write_eof()
        return response

    async def list_models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in models]}, status=models_status)

    app = web.Application()
    app.router.add_post("/v1/completions", generate)
    app.router.add_post("/v1/chat/completions", generate)
    app.router.add_get("/v1/models", list_models)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextmanager
def in_a_thread(server: AbstractAsyncContextManager[str]) -> Iterator[str]:
    """Runs a server on a loop of its own: what is tested runs loops in the caller's thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result(30)
    finally:
        asyncio.run_coroutine_threadsafe(server.__aexit__(None, None, None), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
