"""What a client that has been cut off leaves at the edge: nothing, not even until a collection of garbage."""

import asyncio
import gc
import json
import socket
import struct
import sys
from collections.abc import Callable
from typing import cast

import grpc
import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from kvrelay.core.errors import UnavailableError
from kvrelay.core.rpc.calls import CallInterceptor, Context
from kvrelay.core.rpc.connections import channel_options, serve_insecure, server_options
from kvrelay.v1 import router_pb2, router_pb2_grpc
from router.edge.grpc_service import RouterService
from router.edge.http_protocol import BoundedHttp
from router.request import RoutedRequest
from tests.router.edge.edge_parts import ScriptedRelay, make_edge
from tests.router.edge.gateway_client import COMPLETION, Gateway
from tests.router.scripted_nodes import until

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),  # that of the gateway
    pytest.mark.usefixtures("without_collections"),
]


def _is_forgotten(relay: ScriptedRelay) -> Callable[[], bool]:
    """Returns what tells whether the request that the relay has served last exists no more."""
    [*_, request] = relay.requests
    request_id = request.request_id
    relay.reset()
    del request
    # Not by isinstance, which asks objects that stand for others, of other packages, for their class.
    return lambda: (
        not any(type(found) is RoutedRequest and found.request_id == request_id for found in gc.get_objects())
    )


@pytest.mark.parametrize("prompts", [["a"], ["a", "b"]])
async def test_a_stream_whose_client_has_left_is_forgotten(gateway: Gateway, prompts: list[str]) -> None:
    relay = gateway.relay
    relay.hang_at = 2
    body = json.dumps(COMPLETION | {"stream": True, "prompt": prompts}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%s" % (len(body), body)
    )
    await reader.readuntil(b"data: ")
    writer.close()
    await writer.wait_closed()
    await until(lambda: relay.num_running == 0)
    await until(_is_forgotten(relay))


async def test_a_connection_that_its_client_has_reset_is_forgotten(gateway: Gateway) -> None:
    """Until the timeout of idle connections it would keep some kilobytes."""
    body = json.dumps(COMPLETION).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%s" % (len(body), body)
    )
    await reader.readuntil(b'"usage"')
    reset_when_closed = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset_when_closed)
    writer.close()
    own = writer.get_extra_info("sockname")
    await until(lambda: not any(type(found) is BoundedHttp and found.client == own for found in gc.get_objects()))


async def test_an_answer_to_a_client_of_http_1_0_is_forgotten(gateway: Gateway) -> None:
    body = json.dumps(COMPLETION).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(
        b"POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
        % (len(body), body)
    )
    assert b'"usage"' in await reader.read()
    writer.close()
    await writer.wait_closed()
    await until(
        lambda: (
            not any(
                RequestResponseCycle in type(found).__mro__ and found.scope["http_version"] == "1.0"
                for found in gc.get_objects()
            )
        )
    )


async def test_a_grpc_stream_that_has_failed_is_forgotten(relay: ScriptedRelay) -> None:
    relay.fail_with, relay.fail_at = UnavailableError("lost"), 2
    server = grpc.aio.server(interceptors=[CallInterceptor()], options=server_options())
    router_pb2_grpc.add_RouterServicer_to_server(RouterService(make_edge(relay)), server)
    port = await serve_insecure(server, "127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
        stub = cast("router_pb2_grpc.RouterAsyncStub", router_pb2_grpc.RouterStub(channel))
        with pytest.raises(grpc.aio.AioRpcError, match="lost"):
            async for _ in stub.GenerateStream(router_pb2.GenerateRequest(prompt="The capital", max_tokens=50)):
                pass
        await until(_is_forgotten(relay))
    await server.stop(None)


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_a_grpc_request_is_not_kept_while_it_runs(
    relay: ScriptedRelay, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    relay.hang_at = 1
    received: list[router_pb2.GenerateRequest] = []
    admit = RouterService._admit

    async def watched(service: RouterService, request: router_pb2.GenerateRequest, context: Context) -> RoutedRequest:
        received.append(request)
        return await admit(service, request, context)

    monkeypatch.setattr(RouterService, "_admit", watched)
    server = grpc.aio.server(interceptors=[CallInterceptor()], options=server_options())
    router_pb2_grpc.add_RouterServicer_to_server(RouterService(make_edge(relay)), server)
    port = await serve_insecure(server, "127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
        call = getattr(router_pb2_grpc.RouterStub(channel), method)(router_pb2.GenerateRequest(prompt="The capital"))
        await until(lambda: relay.num_running == 1)
        num_references = sys.getrefcount(received[0])
        call.cancel()
    await server.stop(None)
    assert num_references == 2, "more than this test had it"
