"""The health of a node's server, where live and ready are separate, a router that falls silent or sends what cannot be
handled, and what the log says of an end in haste."""

import asyncio
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from decode_node.router_stream import RouterStream
from decode_node.service import DecodeService
from kvrelay.core.errors import DeadlineError
from kvrelay.core.rpc import connections
from kvrelay.core.rpc.connections import WHOLE_SERVER
from kvrelay.node import server as server_module
from kvrelay.node.server import NodeServer
from kvrelay.v1 import decode_node_pb2 as pb
from kvrelay.v1 import decode_node_pb2_grpc, node_pb2, node_pb2_grpc
from tests.chaos.proxy import Proxy
from tests.node.fake_node import make_node
from tests.node.health import health_of
from tests.node.router_end import admit, failure, together

PATIENCE = 10.0


async def test_a_draining_node_is_live_but_not_ready() -> None:
    node = make_node()
    server = NodeServer(node, service := DecodeService(node))
    port = await server.start("127.0.0.1", 0)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            await server.drain(PATIENCE)
            assert await health_of(channel, WHOLE_SERVER) == "SERVING"
            assert await health_of(channel, "kvrelay.v1.Node") == "SERVING"
            assert await health_of(channel, service.name) == "NOT_SERVING"
    finally:
        await server.close()


async def test_a_node_lets_go_of_what_a_router_holds_that_answers_nothing_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that is stopped, or that the network does not reach any more: the connection itself stays open."""
    monkeypatch.setattr(connections, "KEEPALIVE_MS", 500)
    monkeypatch.setattr(server_module, "ROUTER_SILENCE_MS", 500)
    node = make_node()
    server = NodeServer(node, DecodeService(node))
    proxy = Proxy(await server.start("127.0.0.1", 0))
    await proxy.start()
    try:
        async with grpc.aio.insecure_channel(proxy.address) as channel:
            stub = cast("decode_node_pb2_grpc.DecodeNodeAsyncStub", decode_node_pb2_grpc.DecodeNodeStub(channel))
            call = stub.Serve()
            async with asyncio.timeout(PATIENCE):
                await call.write(together(admit("a")))
                await call.read()
                assert node.activity
                proxy.silence()
                await node.activity.idle()
            await node.check_idle()
            call.cancel()
    finally:
        await proxy.close()
        await server.close()


@pytest.mark.parametrize("misses", ["blocks", "first tokens"])
async def test_a_decode_node_lets_go_of_what_a_router_holds_beyond_the_time_of_its_request(misses: str) -> None:
    """One that hangs, but whose connection still answers."""
    command = admit("a")
    command.admit.timeout_ms = 100
    node = make_node()
    server = NodeServer(node, DecodeService(node))
    port = await server.start("127.0.0.1", 0)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(PATIENCE):
            stub = cast("decode_node_pb2_grpc.DecodeNodeAsyncStub", decode_node_pb2_grpc.DecodeNodeStub(channel))
            call = stub.Serve()
            await call.write(together(command))
            if misses == "first tokens":
                await call.write(together(pb.DecodeCommand(pull=pb.Pull(request_id="a", final=True))))
            events: list[pb.DecodeEvent] = []
            while not (events and events[-1].HasField("failed")):
                update = await call.read()
                assert isinstance(update, pb.DecodeUpdate), "the stream goes on"
                events += update.events
            assert isinstance(failure(events[-1]), DeadlineError)
            await node.activity.idle()
            await node.check_idle()
            call.cancel()
    finally:
        await server.close()


@pytest.mark.parametrize(
    ("command", "code", "details"),
    [
        (together(pb.DecodeCommand(pull=pb.Pull(request_id="b"))).SerializeToString(), "INTERNAL", "internal error"),
        (b"\xff", "INVALID_ARGUMENT", "the request is not the protobuf message that this method takes"),
    ],
)
async def test_a_router_is_told_what_ends_its_stream_and_so_is_the_log(
    command: bytes, code: str, details: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A defect of the node's, in the handling of one command, or bytes that are none. Its other requests end, too."""

    def fail(service: DecodeService, pull: pb.Pull, stream: RouterStream) -> None:
        raise ZeroDivisionError("no such case")

    monkeypatch.setattr(DecodeService, "_pull", fail)
    node = make_node()
    server = NodeServer(node, DecodeService(node))
    port = await server.start("127.0.0.1", 0)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(PATIENCE):
            call: Any = channel.stream_stream("/kvrelay.v1.DecodeNode/Serve")()  # of bytes
            await call.write(together(admit("a")).SerializeToString())
            await call.read()
            await call.write(command)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call.read()
            assert (raised.value.code().name, raised.value.details()) == (code, details)
            assert ("no such case" in caplog.text) is (code == "INTERNAL")
            await node.activity.idle()
            await node.check_idle()
    finally:
        await server.close()


async def test_closing_ends_every_stream_at_once_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_GRACE_SECONDS", 10 * PATIENCE)
    node = make_node()
    server = NodeServer(node, DecodeService(node))
    port = await server.start("127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        serving = cast("decode_node_pb2_grpc.DecodeNodeAsyncStub", decode_node_pb2_grpc.DecodeNodeStub(channel)).Serve()
        watching = cast("node_pb2_grpc.NodeAsyncStub", node_pb2_grpc.NodeStub(channel)).Watch(node_pb2.WatchRequest())
        health: Any = health_pb2_grpc.HealthStub(channel)
        watching_health = health.Watch(health_pb2.HealthCheckRequest())
        async with asyncio.timeout(PATIENCE):
            await serving.write(together(admit("a")))
            await serving.read()
            await watching.read()
            await watching_health.read()
            await server.close()
            assert (await watching_health.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert await watching_health.read() is grpc.aio.EOF
    assert not node.engine_thread.is_alive
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("drains", [True, False])
async def test_the_log_counts_what_is_cut_off(drains: bool, caplog: pytest.LogCaptureFixture) -> None:
    """However that comes: by the end of the time to drain, by a second signal, or by a crash."""
    node = make_node()
    server = NodeServer(node, DecodeService(node))
    await server.start("127.0.0.1", 0)
    for name in ("a request", "a lease"):
        node.activity.begin(name)
    if drains:
        await server.drain(0.0)
    await server.close()
    assert [record.getMessage() for record in caplog.records] == ["2 requests or leases are cut off"]
