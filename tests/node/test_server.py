"""The health of a node's server: live and ready are separate."""

import grpc

from decode_node.service import DecodeService
from kvrelay.core.rpc import WHOLE_SERVER
from kvrelay.node.server import NodeServer
from tests.node.fake_node import make_node
from tests.node.health import health_of

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
