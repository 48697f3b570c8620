"""The request of a call as a real gRPC server takes it: read and parsed by us, and not kept."""

import asyncio
import tracemalloc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from kvrelay.core.rpc.calls import LARGE_REQUEST_BYTES, REQUEST_SECONDS, CallInterceptor, Handler
from kvrelay.core.rpc.connections import channel_options, serve_insecure, server_options
from tests.loop_turns import counting_turns

METHOD = "/test.Service/Respond"
PATIENCE = 30.0


class Received:
    """A request as a service gets it."""

    def __init__(self, data: bytes) -> None:
        self.data = data


@asynccontextmanager
async def serving(handler: Handler, *, request_timeout: float = REQUEST_SECONDS) -> AsyncIterator[grpc.aio.Channel]:
    """Yields a channel to a server whose only method is handled by `handler`."""
    server = grpc.aio.server(interceptors=[CallInterceptor(request_timeout=request_timeout)], options=server_options())
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Service", {"Respond": handler})])
    port = await serve_insecure(server, "127.0.0.1", 0)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
            async with asyncio.timeout(PATIENCE):
                yield channel
    finally:
        await server.stop(None)


async def answer(request: Received, context: object) -> bytes:
    return b"answer"


async def answers(request: Received, context: object) -> AsyncIterator[bytes]:
    yield b"answer"


@pytest.mark.parametrize(
    "handler",
    [
        grpc.unary_unary_rpc_method_handler(answer, request_deserializer=Received),
        grpc.unary_stream_rpc_method_handler(answers, request_deserializer=Received),
    ],
    ids=["one response", "a stream"],
)
async def test_a_call_whose_request_does_not_come_is_ended(handler: Handler) -> None:
    """And one that says that none will come is refused. gRPC itself would wait for as long as the client is there."""
    async with serving(handler, request_timeout=0.1) as channel:
        call: Any = channel.stream_stream(METHOD)(wait_for_ready=True)
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "did not arrive within 0.1 s" in await call.details()
        call = channel.stream_stream(METHOD)()
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_request_is_not_kept_while_its_responses_come() -> None:
    num_bytes = 2 << 20

    async def respond(request: Received, context: object) -> AsyncIterator[bytes]:
        assert len(request.data) == num_bytes
        kept = weakref.ref(request)
        del request
        yield b"" if kept() is None else b"it is kept"
        yield b"" if tracemalloc.get_traced_memory()[0] < num_bytes else b"its bytes are kept"

    data = bytes(num_bytes)
    async with serving(grpc.unary_stream_rpc_method_handler(respond, request_deserializer=Received)) as channel:
        tracemalloc.start()
        try:
            call: Any = channel.unary_stream(METHOD)
            assert [response async for response in call(data)] == [b"", b""]
        finally:
            tracemalloc.stop()


class Arrived:
    """The side of a call whose request is here already; of real ones it is not known which have come together."""

    async def read(self) -> bytes:
        return bytes(LARGE_REQUEST_BYTES + 1)


async def test_large_requests_that_have_come_together_begin_in_different_turns_of_the_event_loop() -> None:
    """Parsing and checking one takes so long that others have to get their turn in between."""
    begun_in: list[int] = []
    async with counting_turns() as num_turns:

        async def respond(request: Received, context: object) -> None:
            begun_in.append(num_turns())

        async def find(details: grpc.HandlerCallDetails) -> Handler:
            return grpc.unary_unary_rpc_method_handler(respond, request_deserializer=Received)

        details: Any = SimpleNamespace(method=METHOD)
        handler: Any = await CallInterceptor().intercept_service(find, details)
        await asyncio.gather(*(handler.stream_unary(None, Arrived()) for _ in range(8)))
    assert len(set(begun_in)) == 8
