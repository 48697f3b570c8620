"""Answers of a node that are none of kvrelay's messages: damaged bytes, or those of another program at its address."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from typing import Any

import grpc
import pytest

from kvrelay.core.errors import UnavailableError
from kvrelay.v1 import node_pb2, prefill_node_pb2
from router.nodes.kv_index import KVIndex
from router.nodes.node import NodeState
from router.nodes.registry import Registry
from tests.router.routed import a_request, give_up, take
from tests.router.scripted_cluster import cluster, registered
from tests.router.scripted_nodes import PATIENCE, ScriptedDecode, ScriptedPrefill, soon, until

_GARBLED = b"\xff"


def _raw(handler: Callable[..., Any], behaviour: Callable[..., Any], request: Any) -> Any:
    """Returns a method of a server that answers with bytes."""
    return handler(behaviour, request_deserializer=request.FromString, response_serializer=bytes)


class Garbling(ScriptedDecode):
    """A node whose first description and first message are garbled."""

    def __init__(self) -> None:
        super().__init__()
        self.left = {"Describe", "Watch"}

    def attach(self, server: grpc.aio.Server) -> None:
        super().attach(server)
        methods = {
            "Describe": _raw(grpc.unary_unary_rpc_method_handler, self._describe, node_pb2.DescribeRequest),
            "Watch": _raw(grpc.unary_stream_rpc_method_handler, self._watch, node_pb2.WatchRequest),
        }
        server.add_registered_method_handlers("kvrelay.v1.Node", methods)

    async def _describe(self, request: node_pb2.DescribeRequest, context: object) -> bytes:
        if "Describe" in self.left:
            self.left.remove("Describe")
            return _GARBLED
        return (await self.Describe(request, context)).SerializeToString()

    async def _watch(self, request: node_pb2.WatchRequest, context: object) -> AsyncIterator[bytes]:
        if "Watch" in self.left:
            self.left.remove("Watch")
            yield _GARBLED
            return
        async for message in self.Watch(request, context):
            yield message.SerializeToString()


async def test_a_node_that_was_not_understood_is_asked_again() -> None:
    node = Garbling()
    node.update(0, reset=True)
    async with registered(node) as registry:
        [handle] = registry.decode
        await until(lambda: any("is not understood" in complaint for complaint in handle.logged))
        await until(lambda: handle.state is NodeState.LIVE)
        assert not node.left


async def test_an_unforeseen_error_costs_a_node_its_state_and_not_its_watch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: object) -> None:
        raise ValueError("a fault of ours")

    node = ScriptedDecode()
    async with registered(node) as registry:
        [handle] = registry.decode
        await until(lambda: handle.state is NodeState.LIVE)
        with monkeypatch.context() as faulty:
            faulty.setattr(registry.index, "stored", fail)
            node.update(1)
            await until(lambda: handle.state is NodeState.LOST)
        assert "internal error of the router" in handle.complaint and "a fault of ours" in caplog.text
        node.update(0, reset=True)
        await until(lambda: handle.state is NodeState.LIVE)


@asynccontextmanager
async def _program(greeting: bytes) -> AsyncIterator[str]:
    """Yields the address of a program that answers whatever it is sent with `greeting`."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            await reader.read(1)
            writer.write(greeting)
            await writer.drain()
            writer.close()
            await writer.wait_closed()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


@asynccontextmanager
async def _other_service() -> AsyncIterator[str]:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


@pytest.mark.parametrize(
    ("program", "found"),
    [
        (_other_service(), "is no kvrelay node (Method not found!)"),
        (_program(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n"), "speaks HTTP"),
        (_program(b"-ERR unknown command\r\n"), "does not speak gRPC"),
    ],
)
async def test_what_answers_in_the_place_of_a_node_is_told(
    program: AbstractAsyncContextManager[str], found: str
) -> None:
    async with program as address:
        registry = Registry([], [address], KVIndex(10), timeout=PATIENCE, silence=5.0)
        registry.start()
        await until(lambda: f"what answers there {found}; list nodes by" in registry.decode[0].complaint)
        with pytest.raises(UnavailableError, match=f"{address} is connecting: what answers there"):
            registry.served_model()
        await registry.close()


class GarblingOnce(ScriptedPrefill):
    """A node whose first answer to a renewal of leases is garbled."""

    is_garbled = True

    def attach(self, server: grpc.aio.Server) -> None:
        super().attach(server)
        method = _raw(grpc.unary_unary_rpc_method_handler, self._renew, prefill_node_pb2.RenewLeasesRequest)
        server.add_registered_method_handlers("kvrelay.v1.PrefillNode", {"RenewLeases": method})

    async def _renew(self, request: prefill_node_pb2.RenewLeasesRequest, context: object) -> bytes:
        if self.is_garbled:
            self.is_garbled = False
            return _GARBLED
        return (await self.RenewLeases(request, context)).SerializeToString()


async def test_leases_are_renewed_after_an_answer_that_was_not_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.router.scripted_cluster.ScriptedPrefill", GarblingOnce)
    async with cluster(lease_ttl=0.15) as nodes, aclosing(nodes.relay.run(a_request())) as events:
        first = asyncio.create_task(take(events))
        (await soon(nodes.prefill.calls)).accept("lease")
        assert await soon(nodes.prefill.renewed) == ("lease",)
        assert isinstance(nodes.prefill, GarblingOnce) and not nodes.prefill.is_garbled
        await give_up(first)
