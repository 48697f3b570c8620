"""Where a gRPC server listens, and what is said if it cannot."""

import grpc
import pytest

from kvrelay.core.errors import ConfigurationError
from kvrelay.core.rpc.connections import serve_insecure, server_options


async def test_a_host_that_grpc_alone_does_not_take_is_not_told_as_a_taken_port() -> None:
    server = grpc.aio.server(options=server_options())
    with pytest.raises(ConfigurationError, match=r"cannot listen on 127\.1:0: .*; --host has to be an address of this"):
        await serve_insecure(server, "127.1", 0)
    await server.stop(None)
