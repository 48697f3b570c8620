"""What cannot be served is refused with a 4xx or INVALID_ARGUMENT that says why, and the next request works."""

import json
import random
from typing import Any

import grpc
import pytest

from kvrelay.v1 import router_pb2, router_pb2_grpc
from tests.e2e.client import grpc_request
from tests.e2e.cluster import Cluster
from tests.e2e.processes import PATIENCE_SECONDS

pytestmark = pytest.mark.timeout(120)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JUNK = random.Random(0).randbytes(2 << 20)


def body(**values: Any) -> str:
    return json.dumps({"prompt": "Hello", **values})


def test_more_outputs_than_a_node_runs_at_a_time_are_refused_by_name(cluster: Cluster) -> None:
    status, answer = cluster.router.post(COMPLETIONS, body(n=128))
    assert (status, answer["error"]["param"]) == (400, "n"), answer
    assert "max_num_seqs" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "sent", "status", "says"),
    [
        pytest.param(
            COMPLETIONS, body(prompt="", add_special_tokens=False), 400, "prompt must not be empty", id="empty prompt"
        ),
        pytest.param(COMPLETIONS, body(prompt=[]), 400, "prompt must not be empty", id="no prompt tokens"),
        pytest.param(COMPLETIONS, "{}", 400, "prompt is required", id="no prompt"),
        pytest.param(COMPLETIONS, body(prompt=[9] * 5000), 400, "4096", id="over-long prompt"),
        pytest.param(COMPLETIONS, body(prompt="x " * 10**6), 400, "4096", id="2 MB of prompt"),
        pytest.param(COMPLETIONS, body(max_tokens=4096), 400, "max_tokens", id="over-long output"),
        pytest.param(COMPLETIONS, body(model="gpt-5"), 404, "'gpt-5' does not exist", id="unknown model"),
        pytest.param(COMPLETIONS, body(max_tokens=-1), 400, "max_tokens must be at least 1", id="negative max_tokens"),
        pytest.param(COMPLETIONS, body(temperature="hot"), 400, "temperature", id="temperature as a string"),
        pytest.param(COMPLETIONS, body(temperature=-0.5), 400, "temperature", id="negative temperature"),
        pytest.param(COMPLETIONS, '{"prompt": "Hello"', 400, "not valid JSON", id="invalid JSON"),
        pytest.param(COMPLETIONS, "", 400, "not valid JSON", id="no body"),
        pytest.param(COMPLETIONS, "[1]", 400, "must be a JSON object", id="not an object"),
        pytest.param(COMPLETIONS, body(prompt=[5, 2048]), 400, "token id 2048", id="token id out of range"),
        pytest.param(COMPLETIONS, body(prompt=[-1]), 400, "token id -1", id="negative token id"),
        pytest.param(COMPLETIONS, body(logit_bias={"5000": 1}), 400, "logit_bias", id="bias out of range"),
        pytest.param(COMPLETIONS, JUNK, 400, "not valid JSON", id="2 MB of junk"),
        pytest.param(COMPLETIONS, JUNK * 5, 413, "limit", id="10 MB of junk"),
        pytest.param(CHAT, '{"messages": []}', 400, "messages must not be empty", id="no messages"),
        pytest.param(CHAT, "{}", 400, "messages", id="messages missing"),
        pytest.param(CHAT, body(), 400, "/v1/completions", id="a prompt to chat"),
        pytest.param(CHAT, '{"messages": [{"role": "cat", "content": "x"}]}', 400, "messages[0].role", id="role"),
        pytest.param(CHAT, JUNK, 400, "not valid JSON", id="2 MB of junk to chat"),
        pytest.param("/v1/nothing", body(), 404, "/v1/nothing", id="unknown path"),
    ],
)
def test_http_refuses_what_cannot_be_served_and_goes_on(
    cluster: Cluster, path: str, sent: str | bytes, status: int, says: str
) -> None:
    found, answer = cluster.router.post(path, sent)
    assert found == status, answer
    assert says in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"
    assert cluster.router.complete("Hello", 2)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("request_message", "code", "says"),
    [
        pytest.param(grpc_request([], 4), "INVALID_ARGUMENT", "prompt_token_ids must not be empty", id="empty prompt"),
        pytest.param(router_pb2.GenerateRequest(), "INVALID_ARGUMENT", "is required", id="no prompt"),
        pytest.param(grpc_request([9] * 5000, 4), "INVALID_ARGUMENT", "4096", id="over-long prompt"),
        pytest.param(grpc_request("x " * 10**6, 4), "INVALID_ARGUMENT", "4096", id="2 MB of prompt"),
        pytest.param(grpc_request("Hello", 4, model="gpt-5"), "NOT_FOUND", "'gpt-5' does not exist", id="model"),
        pytest.param(grpc_request("Hello", -1), "INVALID_ARGUMENT", "max_tokens must be", id="negative max_tokens"),
        pytest.param(grpc_request("Hello", 4096), "INVALID_ARGUMENT", "max_tokens", id="over-long output"),
        pytest.param(grpc_request("Hello", 4, temperature=-1), "INVALID_ARGUMENT", "temperature", id="temperature"),
        pytest.param(grpc_request([5, 2048], 4), "INVALID_ARGUMENT", "token id 2048", id="token id out of range"),
    ],
)
def test_grpc_refuses_what_cannot_be_served_and_goes_on(
    cluster: Cluster, request_message: router_pb2.GenerateRequest, code: str, says: str
) -> None:
    stub = router_pb2_grpc.RouterStub(cluster.router.channel)
    with pytest.raises(grpc.RpcError, match=says) as whole:
        stub.Generate(request_message, timeout=PATIENCE_SECONDS)
    with pytest.raises(grpc.RpcError, match=says) as streamed:
        list(stub.GenerateStream(request_message, timeout=PATIENCE_SECONDS))
    assert [error.value.code().name for error in (whole, streamed)] == [code, code]
    assert len(cluster.router.tokens("Hello", 2)) == 2


def test_junk_in_place_of_a_grpc_message_is_an_invalid_argument(cluster: Cluster) -> None:
    generate: grpc.UnaryUnaryMultiCallable[bytes, bytes] = cluster.router.channel.unary_unary(
        "/kvrelay.v1.Router/Generate"
    )
    with pytest.raises(grpc.RpcError, match="not the protobuf message") as raised:
        generate(JUNK, timeout=PATIENCE_SECONDS)
    assert raised.value.code().name == "INVALID_ARGUMENT", raised.value
    assert len(cluster.router.tokens("Hello", 2)) == 2
