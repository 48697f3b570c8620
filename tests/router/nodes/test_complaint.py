"""What the router says of a node that gRPC does not reach."""

import asyncio

import grpc
import pytest
from grpc.aio import Metadata

from kvrelay.core.errors import UnavailableError
from kvrelay.v1 import node_pb2
from router.nodes.complaint import complaint
from router.nodes.node import NodeState
from tests.router.scripted_cluster import registered, settled
from tests.router.scripted_nodes import ScriptedDecode, until


async def test_the_answer_has_the_reasons_of_many_nodes() -> None:
    """Over gRPC it is cut after 512 characters."""
    nodes = [ScriptedDecode(f"decode-{number}") for number in range(5)]
    async with registered(*nodes) as registry:
        await settled(registry)
        for node in nodes:
            await node.stop()
        await until(lambda: all("refused" in node.complaint for node in registry.decode))
        states = [f"{node.node_id} ({node.address}) is lost: Connection refused" for node in nodes]
        with pytest.raises(UnavailableError) as caught:
            registry.check_can_serve()
        assert str(caught.value) == f"no decode node can serve now: {'; '.join(states)}"
        assert len(str(caught.value)) < 512


class StoppedDecode(ScriptedDecode):
    """A node that describes itself once."""

    is_stopped = False

    async def Describe(self, request: node_pb2.DescribeRequest, context: object) -> node_pb2.DescribeResponse:
        if self.is_stopped:
            await asyncio.Event().wait()
        return await super().Describe(request, context)


async def test_a_stopped_node_is_said_not_to_describe_itself() -> None:
    node = StoppedDecode()
    async with registered(node, timeout=0.5) as registry:
        [handle] = registry.decode
        await until(lambda: handle.state is NodeState.LIVE)
        node.is_stopped = True
        node.end_watch()
        await until(lambda: "describe" in handle.complaint)
        assert handle.complaint == "it did not describe itself within 0.5 seconds"
        assert handle.state is NodeState.LOST


UNREACHED = "failed to connect to all addresses; last error: "
UNRESOLVED = "errors resolving decode-a:7000: [field:hostname lookup error:address lookup failed for decode-a:7000: "
REFUSED = "Failed to connect to remote host: Connection refused"
NO_WAY = "connect failed: addr: ipv4:10.0.0.3:7000 error: Network is unreachable"


@pytest.mark.parametrize(
    ("address", "details", "short"),
    [
        ("10.0.0.3:7000", f"{UNREACHED}UNKNOWN: ipv4:10.0.0.3:7000: {REFUSED}", "Connection refused"),
        (
            "10.0.0.3:7000",
            f"{UNREACHED}UNKNOWN: ipv4:10.0.0.3:7000: tcp handshaker shutdown",
            "tcp handshaker shutdown",
        ),
        ("10.0.0.3:7000", f"{UNREACHED}FAILED_PRECONDITION: ipv4:10.0.0.3:7000: {NO_WAY}", NO_WAY),
        (
            "decode-a:7000",
            f"{UNREACHED}UNKNOWN: ipv4:10.0.0.3:7000: {REFUSED}",
            "ipv4:10.0.0.3:7000: Connection refused",
        ),
        ("decode-a:7000", f"{UNRESOLVED}Domain name not found]", "Domain name not found"),
        ("10.0.0.3:7000", "ping timeout", "ping timeout"),
        ("10.0.0.3:7000", "", "UNAVAILABLE"),
    ],
)
def test_what_grpc_says_is_shortened(address: str, details: str, short: str) -> None:
    """These are words of gRPC 1.85."""
    failure = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata(), details)
    assert complaint(failure, address, timeout=5.0) == short
