"""A client of a running router in both protocols, and an observer of its nodes. It uses no code of the router."""

import http.client
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from kvrelay.v1 import node_pb2, node_pb2_grpc, router_pb2, router_pb2_grpc
from tests.e2e.processes import PATIENCE_SECONDS, wait_until

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Router:
    """A running router; `http` is `host:port`. Requests are greedy and ignore end tokens unless they say otherwise."""

    http: str
    model: str
    channel: grpc.Channel

    def generate(self, prompt: str | Sequence[int], max_tokens: int, **sampling: Any) -> router_pb2.GenerateResponse:
        """Sends a request over gRPC, with a prompt of text or of token ids, and returns the whole answer."""
        stub = router_pb2_grpc.RouterStub(self.channel)
        return stub.Generate(grpc_request(prompt, max_tokens, **sampling), timeout=PATIENCE_SECONDS)

    def stream(self, request: router_pb2.GenerateRequest) -> Any:
        return router_pb2_grpc.RouterStub(self.channel).GenerateStream(request, timeout=PATIENCE_SECONDS)

    def tokens(self, prompt: str | Sequence[int], max_tokens: int) -> list[int]:
        [output] = self.generate(prompt, max_tokens).outputs
        return list(output.token_ids)

    def complete(self, prompt: str | Sequence[int], max_tokens: int) -> Json:
        """Sends a request over HTTP and returns the whole body of the completion."""
        body = {"prompt": prompt if isinstance(prompt, str) else list(prompt), "max_tokens": max_tokens}
        status, answer = self.post("/v1/completions", json.dumps(body | {"temperature": 0, "ignore_eos": True}))
        assert status == 200, answer
        return answer

    def stream_text(self, prompt: str, max_tokens: int) -> Iterator[Json]:
        """Sends a request over HTTP and yields the events of the stream, the last one with the trace."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        connection = http.client.HTTPConnection(self.http, timeout=PATIENCE_SECONDS)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            assert response.status == 200
            for line in response:
                if line.startswith(b"data: ") and line != b"data: [DONE]\n":
                    yield json.loads(line.removeprefix(b"data: "))
        finally:
            connection.close()

    def text(self, prompt: str | Sequence[int], max_tokens: int) -> str:
        text: str = self.complete(prompt, max_tokens)["choices"][0]["text"]
        return text

    def post(self, path: str, body: str | bytes) -> tuple[int, Json]:
        return self._exchange("POST", path, body)

    def health(self) -> tuple[int, Json]:
        return self._exchange("GET", "/health", None)

    def metrics(self) -> str:
        connection = http.client.HTTPConnection(self.http, timeout=PATIENCE_SECONDS)
        try:
            connection.request("GET", "/metrics")
            return connection.getresponse().read().decode()
        finally:
            connection.close()

    def metric(self, name: str, **labels: str) -> float:
        """Returns the sum of the samples that have these labels, 0 while there is none."""
        total = 0.0
        for line in self.metrics().splitlines():
            found = re.fullmatch(rf"{re.escape(name)}(?:\{{(.*)\}})? (\S+)", line)
            if found and all(f'{label}="{value}"' in (found[1] or "") for label, value in labels.items()):
                total += float(found[2])
        return total

    def wait_metric(self, expected: float, name: str, **labels: str) -> None:
        wait_until(
            lambda: self.metric(name, **labels) == expected,
            lambda: f"{name} {labels} is {self.metric(name, **labels)}, not {expected}",
        )

    def _exchange(self, method: str, path: str, body: str | bytes | None) -> tuple[int, Json]:
        connection = http.client.HTTPConnection(self.http, timeout=PATIENCE_SECONDS)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()


@contextmanager
def router_at(ready: Json) -> Iterator[Router]:
    """Yields the router of the ready line that `kvrelay serve` or `kvrelay router` has printed."""
    with grpc.insecure_channel(ready["grpc_address"]) as channel:
        yield Router(ready["http_address"], ready["model"], channel)


def grpc_request(prompt: str | Sequence[int], max_tokens: int, **sampling: Any) -> router_pb2.GenerateRequest:
    values = {"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens, **sampling}
    if isinstance(prompt, str):
        return router_pb2.GenerateRequest(prompt=prompt, **values)
    return router_pb2.GenerateRequest(prompt_token_ids=router_pb2.TokenIds(ids=prompt), **values)


def wait_idle(address: str) -> None:
    """Returns once the node at this address reports that nothing runs, waits, is leased, or keeps a block in use."""
    load = load_when(address, is_idle)
    assert is_idle(load), f"the node at {address} is not idle: {load}"


def load_when(address: str, condition: Callable[[node_pb2.NodeLoad], bool]) -> node_pb2.NodeLoad:
    """Returns the node's load when it meets the condition, or the last one when time is up."""
    load = node_pb2.NodeLoad()
    with grpc.insecure_channel(address) as channel:
        watch = node_pb2_grpc.NodeStub(channel).Watch(node_pb2.WatchRequest(), timeout=PATIENCE_SECONDS)
        try:
            for message in watch:
                if message.HasField("load"):
                    load = message.load
                    if condition(load):
                        break
        except grpc.RpcError as error:
            if load.num_blocks == 0:
                raise AssertionError(f"the node at {address} does not report its load") from error
        finally:
            watch.cancel()
    return load


def is_idle(load: node_pb2.NodeLoad) -> bool:
    under_way = load.num_requests_running + load.num_requests_waiting + load.num_queued_tokens + load.num_leases
    return under_way == 0 and load.num_free_blocks == load.num_blocks
