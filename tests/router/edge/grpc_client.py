"""A running gRPC service of a router, and its client."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeAlias

import grpc

from kvrelay.core.rpc.calls import CallInterceptor
from kvrelay.core.rpc.connections import channel_options, serve_insecure, server_options
from kvrelay.v1 import router_pb2_grpc
from router.edge.grpc_service import RouterService

Stub: TypeAlias = "router_pb2_grpc.RouterAsyncStub"


@asynccontextmanager
async def serving(service: RouterService) -> AsyncIterator[Stub]:
    server = grpc.aio.server(interceptors=[CallInterceptor()], options=server_options())
    router_pb2_grpc.add_RouterServicer_to_server(service, server)
    port = await serve_insecure(server, "127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
        yield router_pb2_grpc.RouterStub(channel)  # type: ignore[misc]
    await server.stop(None)
