"""Health over a real connection: watchers follow it, and one that takes nothing holds up nobody."""

import asyncio
import struct
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvrelay.core.rpc.calls import CallInterceptor
from kvrelay.core.rpc.connections import (
    WHOLE_SERVER,
    add_health_and_reflection,
    channel_options,
    serve_insecure,
    server_options,
    set_serving,
)
from kvrelay.core.rpc.health_service import HealthService

SERVICE = "some.Service"
PATIENCE = 20.0
_HEADERS, _SETTINGS = 1, 4
_INITIAL_WINDOW_SIZE = 4


@pytest.fixture
async def server() -> AsyncIterator[tuple[HealthService, int]]:
    server = grpc.aio.server(interceptors=[CallInterceptor()], options=server_options())
    servicer = add_health_and_reflection(server, [SERVICE])
    port = await serve_insecure(server, "127.0.0.1", 0)
    yield servicer, port
    await server.stop(None)


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + payload


async def watch_and_take_nothing(port: int) -> asyncio.StreamWriter:
    """Watches over HTTP/2 by hand, with a window of 0 bytes. Returns when the call has begun."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    fields = {":method": "POST", ":scheme": "http", ":path": "/grpc.health.v1.Health/Watch", ":authority": "x"}
    fields |= {"te": "trailers", "content-type": "application/grpc"}
    head = b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields.items()
    )
    message = health_pb2.HealthCheckRequest(service=SERVICE).SerializeToString()
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    writer.write(frame(_SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW_SIZE, 0)))
    writer.write(frame(_HEADERS, 4, 1, head) + frame(0, 1, 1, b"\0" + struct.pack(">I", len(message)) + message))
    kind = None
    while kind != _HEADERS:
        start = await reader.readexactly(9)
        kind = start[3]
        await reader.readexactly(int.from_bytes(start[:3], "big"))
    return writer


async def test_a_watcher_is_told_each_change(server: tuple[HealthService, int]) -> None:
    servicer, port = server
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        call = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=PATIENCE)
        assert (await call.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        for serving in (True, False, True):
            await set_serving(servicer, [SERVICE], serving=serving)
            assert ((await call.read()).status == health_pb2.HealthCheckResponse.SERVING) is serving
        call.cancel()


async def test_all_services_are_listed(server: tuple[HealthService, int]) -> None:
    servicer, port = server
    await set_serving(servicer, [SERVICE], serving=False)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.List(health_pb2.HealthListRequest(), timeout=PATIENCE)  # type: ignore[attr-defined]
    statuses = {service: entry.status for service, entry in answer.statuses.items()}
    assert statuses == {
        WHOLE_SERVER: health_pb2.HealthCheckResponse.SERVING,
        SERVICE: health_pb2.HealthCheckResponse.NOT_SERVING,
    }


async def test_a_watcher_that_takes_nothing_holds_up_no_change(server: tuple[HealthService, int]) -> None:
    servicer, port = server
    await set_serving(servicer, [SERVICE], serving=True)
    writer = await watch_and_take_nothing(port)
    async with asyncio.timeout(PATIENCE):
        await set_serving(servicer, [SERVICE], serving=False)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=PATIENCE)
    assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
    writer.close()
