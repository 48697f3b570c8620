"""Nodes that are listed by a name: what their name says is asked again when they cannot be reached."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvrelay.core.rpc import connections
from kvrelay.core.rpc.connections import (
    WHOLE_SERVER,
    add_health_and_reflection,
    channel_options,
    serve_insecure,
    set_serving,
)
from tests.chaos.proxy import Proxy

PATIENCE = 20.0  # less than the 30 s for which gRPC keeps to an answer unless it is told otherwise


class NameServer(asyncio.DatagramProtocol):
    """A DNS server that answers each question for an IPv4 address with `address`."""

    def __init__(self) -> None:
        self.address = "127.0.0.1"
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)  # which Python 3.11 does not say

    def datagram_received(self, data: bytes, peer: tuple[str, int]) -> None:
        assert self._transport is not None
        end = data.index(b"\0", 12) + 5  # of the question: a name, a type and a class
        is_ipv4 = data[end - 4 : end - 2] == b"\0\1"
        header = data[:2] + struct.pack(">5H", 0x8180, 1, int(is_ipv4), 0, 0)
        answer = struct.pack(">3HIH", 0xC00C, 1, 1, 0, 4) + socket.inet_aton(self.address)
        self._transport.sendto(header + data[12:end] + (answer if is_ipv4 else b""), peer)


@asynccontextmanager
async def healthy_server(host: str, port: int) -> AsyncIterator[None]:
    server = grpc.aio.server()
    health = add_health_and_reflection(server, [])
    await serve_insecure(server, host, port)
    await set_serving(health, [WHOLE_SERVER], serving=True)
    try:
        yield
    finally:
        await server.stop(None)


async def test_a_node_that_returns_with_another_address_is_found_by_its_name(unused_tcp_port: int) -> None:
    """A pod that is replaced, for one, keeps its name only."""
    loop = asyncio.get_running_loop()
    transport, names = await loop.create_datagram_endpoint(NameServer, ("127.0.0.1", 0))
    _, name_port = transport.get_extra_info("sockname")
    target = f"dns://127.0.0.1:{name_port}/node.test.:{unused_tcp_port}"
    try:
        async with asyncio.timeout(PATIENCE), grpc.aio.insecure_channel(target, options=channel_options()) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            for names.address in ("127.0.0.2", "127.0.0.3"):
                async with healthy_server(names.address, unused_tcp_port):
                    await stub.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
    finally:
        transport.close()


async def test_a_node_is_found_by_its_name_although_the_connection_to_the_old_address_stays_open(
    monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int
) -> None:
    """As after a power failure: the lost machine closes nothing and refuses nothing, it only answers no more."""
    monkeypatch.setattr(connections, "KEEPALIVE_MS", 500)
    monkeypatch.setattr(connections, "STOPPED_MS", 0)
    loop = asyncio.get_running_loop()
    transport, names = await loop.create_datagram_endpoint(NameServer, ("127.0.0.1", 0))
    _, name_port = transport.get_extra_info("sockname")
    machine = Proxy(unused_tcp_port)
    await machine.start()
    port = int(machine.address.rpartition(":")[2])
    target = f"dns://127.0.0.1:{name_port}/node.test.:{port}"
    options = channel_options(silence=0.5)
    try:
        async with asyncio.timeout(PATIENCE), grpc.aio.insecure_channel(target, options=options) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            async with healthy_server("127.0.0.1", unused_tcp_port), healthy_server("127.0.0.3", port):
                await stub.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
                machine.silence()
                names.address = "127.0.0.3"
                answered = False
                while not answered:  # calls over the old connection fail, once it is given up
                    with suppress(grpc.aio.AioRpcError):
                        await stub.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
                        answered = True
    finally:
        await machine.close()
        transport.close()
