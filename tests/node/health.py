"""Asks a gRPC server for its health."""

from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_TIMEOUT = 10.0


async def health_of(channel: grpc.aio.Channel, service: str) -> str:
    """Returns the name of the status that a server reports for a service, "" for the whole server."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=_TIMEOUT)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
