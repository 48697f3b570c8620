"""`make demo`: starts a router, a prefill node and a decode node, and asks the demo model a few things.

Every answer is printed as it arrives, through gRPC and through HTTP, with how it was served below it. Exits with 1 when
an answer is not what it should be, and leaves no process behind.
"""

import http.client
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import grpc
from pydantic import Field

from bench.local_cluster import ClusterAddress, local_cluster
from kvrelay.core.config.settings import ProcessSettings, load_settings
from kvrelay.core.errors import KVRelayError, UnavailableError
from kvrelay.core.rpc.connections import WITHOUT_PROXY
from kvrelay.v1 import router_pb2, router_pb2_grpc

BLOCK_SIZE = 16
TIMEOUT_SECONDS = 120.0

# Two questions after the same conversation: what the first one computed, the second finds by name.
CONVERSATION = (
    ("system", "You are a helpful assistant."),
    ("user", "What is the capital of France?"),
    ("assistant", "The capital of France is Paris."),
    ("user", "What is the capital of Germany?"),
    ("assistant", "The capital of Germany is Berlin."),
)


class DemoSettings(ProcessSettings):
    """Start a small cluster on this machine and watch the demo model answer."""

    model: str = Field(default=str(Path(__file__).parent / "model"), description="Directory of the model.")
    prefill_nodes: int = Field(default=1, ge=0, description="Prefill nodes; 0: decode nodes prefill themselves.")
    decode_nodes: int = Field(default=1, ge=1, description="Decode nodes.")
    connector: Literal["shared_memory", "ucx", "redis"] = Field(
        default="shared_memory", description="How KV blocks travel; redis expects a server on its usual port."
    )


Message = tuple[str, str]
"""Role and content."""


@dataclass(frozen=True, slots=True)
class Question:
    """What to ask, over which protocol, and a word that the answer must contain. Either `prompt` or `chat` is given."""

    title: str
    protocol: Literal["gRPC", "HTTP"]
    prompt: str = ""
    chat: tuple[Message, ...] = ()
    expected: str = ""
    max_tokens: int = 24
    prefix_hit: bool = False  # its first blocks must be found by name


QUESTIONS = (
    Question("a text to continue", "gRPC", prompt="The capital of France is", expected="Paris"),
    Question("a question", "gRPC", chat=(("user", "What is the capital of Japan?"),), expected="Tokyo"),
    Question(
        "a conversation",
        "gRPC",
        chat=(*CONVERSATION, ("user", "What is the capital of Italy?")),
        expected="Rome",
    ),
    Question(
        "the same conversation, another question: only the end is computed",
        "gRPC",
        chat=(*CONVERSATION, ("user", "What is the capital of Spain?")),
        expected="Madrid",
        prefix_hit=True,
    ),
    Question("a longer text", "gRPC", prompt="Once upon a time", max_tokens=120),
    Question("a question", "HTTP", chat=(("user", "What is the capital of Germany?"),), expected="Berlin"),
    Question("a text to continue", "HTTP", prompt="The capital of Italy is", expected="Rome"),
)


@dataclass(slots=True)
class Answer:
    """The answer so far. `arrivals` are the seconds from sending the request to each piece of text."""

    text: str = ""
    num_tokens: int = 0
    arrivals: list[float] = field(default_factory=list)
    served: dict[str, object] = field(default_factory=dict)  # the fields of kvrelay.v1.RequestTrace

    def add(self, text: str, started: float) -> None:
        if text:
            self.arrivals.append(time.monotonic() - started)
            self.text += text
            print(text, end="", flush=True)

    def number(self, name: str) -> int:
        value = self.served.get(name, 0)
        assert isinstance(value, int)
        return value


def main(argv: Sequence[str]) -> int:
    settings = load_settings(DemoSettings, argv, prog="python -m demo.run")
    arguments = ["--prefill-nodes", str(settings.prefill_nodes), "--decode-nodes", str(settings.decode_nodes)]
    arguments += ["--connector", settings.connector]
    arguments += ["--block-size", str(BLOCK_SIZE), "--log-level", "warning"]
    arguments += ["--served-model-name", "kvrelay-demo"]
    arguments += ["--local-prefill-max-tokens", "0"]  # short prompts, too, take the way over the prefill node
    print("Starting a router, the prefill nodes and the decode nodes ...", flush=True)
    try:
        with local_cluster(settings.model, arguments) as address:
            print(f"Ready: {address.model} at http://{address.http}/v1 and gRPC {address.grpc}.\n")
            problems = [problem for question in QUESTIONS for problem in ask(address, question)]
    except (KVRelayError, grpc.RpcError, OSError) as error:
        problems = [str(error)]
    for problem in problems:
        print(f"demo: {problem}", file=sys.stderr)
    print("Something is wrong, see above." if problems else "All answers are right, and every process has ended.")
    return 1 if problems else 0


def ask(address: ClusterAddress, question: Question) -> Iterator[str]:
    """Prints question and answer; yields what is wrong with it."""
    print(f"--- {question.title} ({question.protocol})")
    print(f"> {question.prompt or question.chat[-1][1]}\n< ", end="", flush=True)
    answer = _ask_grpc(address, question) if question.protocol == "gRPC" else _ask_http(address, question)
    print(f"\n  {_timing(answer)}\n  {_served(answer)}\n", flush=True)
    if not answer.text.strip():
        yield f"no answer to {question.prompt or question.chat[-1][1]!r}"
    elif question.expected not in answer.text:
        yield f"{question.expected!r} is missing in {answer.text!r}"
    if question.prefix_hit and not answer.number("num_cached_tokens"):
        yield "a prefix that had been computed was not found by name"


def _ask_grpc(address: ClusterAddress, question: Question) -> Answer:
    request = router_pb2.GenerateRequest(max_tokens=question.max_tokens, temperature=0.0)
    if question.chat:
        request.chat.messages.extend(
            router_pb2.ChatMessage(role=role, content=content) for role, content in question.chat
        )
    else:
        request.prompt = question.prompt
    answer = Answer()
    with grpc.insecure_channel(address.grpc, options=WITHOUT_PROXY) as channel:
        started = time.monotonic()
        for response in router_pb2_grpc.RouterStub(channel).GenerateStream(request, timeout=TIMEOUT_SECONDS):
            answer.add("".join(output.text for output in response.outputs), started)
            if response.HasField("trace"):
                answer.served = {
                    name.name: getattr(response.trace, name.name) for name in response.trace.DESCRIPTOR.fields
                }
                answer.num_tokens = response.usage.completion_tokens
    return answer


def _ask_http(address: ClusterAddress, question: Question) -> Answer:
    body: dict[str, object] = {
        "model": address.model,
        "max_tokens": question.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if question.chat:
        body["messages"] = [{"role": role, "content": content} for role, content in question.chat]
    else:
        body["prompt"] = question.prompt
    path = "/v1/chat/completions" if question.chat else "/v1/completions"
    connection = http.client.HTTPConnection(address.http, timeout=TIMEOUT_SECONDS)
    answer = Answer()
    try:
        started = time.monotonic()
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        for event in _server_sent_events(connection.getresponse()):
            for choice in event.get("choices", []):
                answer.add(choice.get("delta", {}).get("content") or choice.get("text") or "", started)
            if event.get("usage"):
                answer.num_tokens = event["usage"]["completion_tokens"]
            answer.served = event.get("kvrelay") or answer.served
    finally:
        connection.close()
    return answer


def _server_sent_events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    if response.status != http.HTTPStatus.OK:
        raise UnavailableError(f"HTTP {response.status}: {response.read().decode()}")
    for line in response:
        data = line.decode().strip().removeprefix("data: ")
        if data == "[DONE]":
            return
        if data:
            yield json.loads(data)


def _timing(answer: Answer) -> str:
    if not answer.arrivals:
        return "nothing came"
    ttft, last = answer.arrivals[0], answer.arrivals[-1]
    itl = (last - ttft) / max(1, answer.num_tokens - 1)
    return f"TTFT {ttft * 1000:.1f} ms, mean ITL {itl * 1000:.2f} ms, {answer.num_tokens} tokens"


def _served(answer: Answer) -> str:
    served = answer.served
    if not served:
        return "(no word of how it was served)"
    nodes = f"{served['prefill_node']} -> {served['decode_node']}" if served["prefill_node"] else served["decode_node"]
    num_blocks, num_found = answer.number("num_prompt_blocks"), answer.number("num_cached_tokens") // BLOCK_SIZE
    return (
        f"{nodes}; prompt blocks: {num_blocks - num_found} computed, {num_found} found by name, "
        f"{answer.number('num_transferred_blocks')} moved"
    )


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:  # by then its processes have ended, or are about to
        sys.exit(130)
