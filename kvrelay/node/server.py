"""A node's gRPC server: its own service, the `Node` service, health and reflection.

Health distinguishes live and ready. The whole server ("") and the `Node` service are SERVING as long as the process
need not be restarted. The node's own service is SERVING while it takes new requests, that is, not before the start is
complete, while draining, or after a crash.
"""

import asyncio
import logging
from contextlib import suppress
from typing import Protocol

import grpc

from kvrelay.core.node_report import NodeRole
from kvrelay.core.rpc.calls import CallInterceptor
from kvrelay.core.rpc.connections import (
    WHOLE_SERVER,
    add_health_and_reflection,
    serve_insecure,
    server_options,
    set_serving,
)
from kvrelay.core.tasks import begin_task, end_tasks
from kvrelay.node.node import Node
from kvrelay.node.node_service import NodeService
from kvrelay.v1 import node_pb2_grpc

_logger = logging.getLogger(__name__)
_GRACE_SECONDS = 2.0
# How long a router may answer nothing. One that is gone keeps blocks here which others wait for; one that is stopped
# (SIGSTOP) would have to place its requests again.
ROUTER_SILENCE_MS = 15_000
_NODE_SERVICE = "kvrelay.v1.Node"


class Service(Protocol):
    """The gRPC service of one kind of node."""

    name: str
    role: NodeRole

    def __init__(self, node: Node) -> None: ...

    def attach(self, server: grpc.aio.Server) -> None: ...

    def start(self) -> None:
        """Starts the node with this service's handlers."""
        ...

    async def close(self) -> None:
        """Ends every stream and request of this service."""
        ...


class NodeServer:
    """The server of a node, which it owns: `close` ends both."""

    def __init__(self, node: Node, service: Service) -> None:
        self._node = node
        self._service = service
        options = server_options(keepalive_timeout_ms=ROUTER_SILENCE_MS, ping_timeout_ms=ROUTER_SILENCE_MS)
        self._server = grpc.aio.server(interceptors=[CallInterceptor()], options=options)
        service.attach(self._server)
        node_pb2_grpc.add_NodeServicer_to_server(NodeService(node, service.role), self._server)
        self._health = add_health_and_reflection(self._server, [service.name, _NODE_SERVICE])
        self._crash_report: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Starts to serve; returns the bound port. Raises ConfigurationError when it cannot listen there."""
        self._service.start()
        bound = await serve_insecure(self._server, host, port)
        await self._report(live=True, ready=True)
        self._crash_report = begin_task(self._report_crash(), name="crash-report")
        return bound

    async def drain(self, timeout: float) -> None:
        """Refuses new requests and waits at most `timeout` seconds for those under way, and for a store to be offered
        what they have computed."""
        await self._report(live=True, ready=False)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._node.drain()

    async def close(self) -> None:
        await end_tasks(self._crash_report)
        if num_left := len(self._node.activity):
            _logger.warning("%d requests or leases are cut off", num_left)
        await self._report(live=False, ready=False)
        self._health.close()
        self._node.event_log.close()
        await self._service.close()
        await self._server.stop(_GRACE_SECONDS)
        await self._node.close()

    async def _report(self, *, live: bool, ready: bool) -> None:
        await set_serving(self._health, [WHOLE_SERVER, _NODE_SERVICE], serving=live)
        await set_serving(self._health, [self._service.name], serving=ready)

    async def _report_crash(self) -> None:
        await self._node.crashed.wait()
        await self._report(live=False, ready=False)
