"""Answers of a node that are none of kvrelay's messages: damaged bytes, or those of another program at its address."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import grpc
import pytest

from kvrelay.v1 import node_pb2, prefill_node_pb2
from router.nodes.node import NodeState
from tests.router.routed import a_request, give_up, take
from tests.router.scripted_cluster import cluster, registered
from tests.router.scripted_nodes import ScriptedDecode, ScriptedPrefill, soon, until

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
