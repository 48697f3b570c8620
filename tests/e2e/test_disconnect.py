"""A client that goes away in mid-stream: its request ends on every node, long before it would have by itself."""

import json
import socket

import pytest

from tests.e2e.client import grpc_request
from tests.e2e.cluster import Cluster
from tests.e2e.processes import PATIENCE_SECONDS

pytestmark = pytest.mark.timeout(120)

LONG = 3500  # tokens; seconds of work


def steps_of_decode_node(cluster: Cluster) -> float:
    """Returns how many steps the decode node has made, as the router was told last."""
    return cluster.router.metric("kvrelay:node_steps_total", node="decode-0")


def ended_early(cluster: Cluster, steps_before: float) -> bool:
    """Waits until nothing runs anywhere, and tells whether that took fewer steps than the request has tokens."""
    cluster.wait_idle()
    cluster.router.wait_metric(0, "kvrelay:num_requests_running")
    cluster.router.wait_metric(0, "kvrelay:node_requests_running", node="decode-0")
    return steps_of_decode_node(cluster) - steps_before < LONG - 50


def abort_count(cluster: Cluster) -> float:
    return cluster.router.metric("kvrelay:request_success_total", finished_reason="abort")


@pytest.mark.parametrize("stream", [True, False])
def test_a_closed_http_connection_ends_its_request_everywhere(cluster: Cluster, stream: bool) -> None:
    aborts, steps = abort_count(cluster), steps_of_decode_node(cluster)
    body = json.dumps({"prompt": "Once upon a time", "max_tokens": LONG, "ignore_eos": True, "stream": stream})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    host, port = cluster.router.http.split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS) as connection:
        connection.sendall(f"{head}\r\n\r\n{body}".encode())
        if stream:
            received = b""
            while b"data: " not in received:
                received += connection.recv(4096)
        cluster.router.wait_metric(1, "kvrelay:node_requests_running", node="decode-0")
    assert ended_early(cluster, steps)
    assert abort_count(cluster) == aborts + 1


def test_a_cancelled_grpc_stream_ends_its_request_everywhere(cluster: Cluster) -> None:
    aborts, steps = abort_count(cluster), steps_of_decode_node(cluster)
    stream = cluster.router.stream(grpc_request("Once upon a time", LONG))
    next(iter(stream))
    cluster.router.wait_metric(1, "kvrelay:node_requests_running", node="decode-0")
    stream.cancel()
    assert ended_early(cluster, steps)
    assert abort_count(cluster) == aborts + 1
