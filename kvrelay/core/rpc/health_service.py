"""The standard gRPC health service, in which no watcher holds up a change of status.

grpcio's own service holds a lock while it writes to a watcher, and takes the same lock to change a status: one client
that takes nothing would keep the server from saying that it stops, and so from stopping. Invariant: `set` waits for
nobody, and every watcher is told the latest status as soon as it takes it.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2


class HealthService(health.aio.HealthServicer):
    """The service of one server, used on its loop."""

    def __init__(self) -> None:
        super().__init__()
        self._statuses: dict[str, int] = {health.OVERALL_HEALTH: health_pb2.HealthCheckResponse.SERVING}
        self._changed = asyncio.Event()
        self._closed = False

    def close(self) -> None:
        """Ends every `Watch`, which a server that stops would otherwise wait for, when it has told the latest
        status."""
        self._closed = True
        self._changed.set()

    async def Watch(  # type: ignore[override]  # a generator, whose writes have the interceptor's deadline
        self, request: health_pb2.HealthCheckRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        last: int | None = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
            if status != last:
                last = status
                yield health_pb2.HealthCheckResponse(status=status)
            elif self._closed:
                return
            else:
                await changed.wait()

    async def List(self, request: Any, context: Any) -> Any:
        """Returns the latest status of each service. grpcio's own service lacks this method of the standard, and fails
        with a traceback when it is called."""
        answer = health_pb2.HealthListResponse()  # type: ignore[attr-defined]  # its stubs are older
        for service, status in self._statuses.items():
            answer.statuses[service].status = status
        return answer

    async def set(self, service: str, status: int) -> None:
        await super().set(service, status)
        self._statuses[service] = status
        self._changed.set()
        self._changed = asyncio.Event()
