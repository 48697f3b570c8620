"""A node's gRPC server: its own service, the `Node` service, health and reflection.

Invariant: it is SERVING exactly from when every service can answer until the first step of closing.
"""

import asyncio
import logging
from typing import Protocol

import grpc

from kvrelay.core.rpc import ErrorInterceptor, add_health_and_reflection, serve_insecure, server_options, set_serving
from kvrelay.node.node import Node
from kvrelay.node.node_service import NodeService
from kvrelay.v1 import node_pb2, node_pb2_grpc

_logger = logging.getLogger(__name__)
_GRACE_SECONDS = 2.0
_NODE_SERVICE = "kvrelay.v1.Node"


class Service(Protocol):
    """A node kind's own gRPC service."""

    name: str
    role: "node_pb2.NodeRole.ValueType"

    def attach(self, server: grpc.aio.Server) -> None: ...

    def start(self) -> None:
        """Starts the node with this service's handlers."""
        ...

    async def close(self) -> None:
        """Ends every stream and request of this service."""
        ...


class NodeServer:
    """Owns the node: `close` ends both."""

    def __init__(self, node: Node, service: Service) -> None:
        self._node = node
        self._service = service
        self._server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=server_options())
        service.attach(self._server)
        node_pb2_grpc.add_NodeServicer_to_server(NodeService(node, service.role), self._server)
        self._names = [service.name, _NODE_SERVICE]
        self._health = add_health_and_reflection(self._server, self._names)

    async def start(self, host: str, port: int) -> int:
        """Returns the bound port. Raises ConfigurationError when it can not listen there."""
        self._service.start()
        bound = await serve_insecure(self._server, host, port)
        await set_serving(self._health, self._names, serving=True)
        return bound

    async def drain(self, timeout: float) -> None:
        """Not ready, no new requests; waits at most `timeout` seconds for what is under way."""
        await set_serving(self._health, self._names, serving=False)
        try:
            async with asyncio.timeout(timeout):
                await self._node.drain()
        except TimeoutError:
            _logger.warning(
                "%d requests or leases are cut off after %g s of draining", len(self._node.activity), timeout
            )

    async def close(self) -> None:
        await set_serving(self._health, self._names, serving=False)
        self._node.event_log.close()
        await self._service.close()
        await self._server.stop(_GRACE_SECONDS)
        await self._node.close()
