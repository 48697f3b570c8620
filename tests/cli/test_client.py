"""complete, chat and status against a small router on a real port."""

import io
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from kvrelay.cli import client
from kvrelay.core.errors import KVRelayError, UnavailableError, UnknownModelError
from kvrelay.core.rpc.errors import rich_status
from kvrelay.v1 import common_pb2, router_pb2, router_pb2_grpc


@dataclass
class EchoRouter(router_pb2_grpc.RouterServicer):
    """A router that answers with the last words it was given, each of them a token and a message of its own, and keeps
    what it was asked."""

    asked: list[router_pb2.GenerateRequest] = field(default_factory=list)
    refusal: KVRelayError | None = None  # of every call

    def GenerateStream(
        self, request: router_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[router_pb2.GenerateResponse]:
        self.asked.append(request)
        self._check(context)
        if request.model == "missing":
            error = UnknownModelError("no model 'missing' here; there is 'echo'", field="model")
            context.abort_with_status(rpc_status.to_status(rich_status(error)))
        words = (request.chat.messages[-1].content if request.chat.messages else request.prompt).split()
        is_cut = len(words) > request.max_tokens
        words = words[: request.max_tokens]
        reason = common_pb2.FINISH_REASON_LENGTH if is_cut else common_pb2.FINISH_REASON_STOP
        for word in words:
            yield router_pb2.GenerateResponse(outputs=[router_pb2.OutputChunk(text=f" {word}")])
        yield router_pb2.GenerateResponse(
            outputs=[router_pb2.OutputChunk(finish_reason=reason)],
            usage=router_pb2.Usage(prompt_tokens=9, completion_tokens=len(words)),
            trace=router_pb2.RequestTrace(prefill_node="prefill-0", decode_node="decode-0", num_transferred_blocks=1),
        )

    def ListModels(
        self, request: router_pb2.ListModelsRequest, context: grpc.ServicerContext
    ) -> router_pb2.ListModelsResponse:
        self._check(context)
        return router_pb2.ListModelsResponse(models=[router_pb2.Model(id="echo", max_model_len=512)])

    def _check(self, context: grpc.ServicerContext) -> None:
        if self.refusal is not None:
            context.abort_with_status(rpc_status.to_status(rich_status(self.refusal)))


@dataclass
class RunningRouter:
    url: str
    router: EchoRouter
    health: health.HealthServicer


@pytest.fixture
def running() -> Iterator[RunningRouter]:
    router = EchoRouter()  # type: ignore[abstract]  # what it lacks answers UNIMPLEMENTED
    state = health.HealthServicer()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    router_pb2_grpc.add_RouterServicer_to_server(router, server)
    health_pb2_grpc.add_HealthServicer_to_server(state, server)
    state.set(client.ROUTER_SERVICE, health_pb2.HealthCheckResponse.SERVING)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield RunningRouter(f"127.0.0.1:{port}", router, state)
    server.stop(None).wait()


@pytest.fixture
def useless_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_grpc_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("grpc_proxy", "http://127.0.0.1:9")


@pytest.mark.usefixtures("useless_proxy")
def test_a_router_is_asked_directly_where_the_web_is_behind_a_proxy(running: RunningRouter) -> None:
    assert client.status(["--url", running.url]) == 0
    assert client.complete(["one", "--url", running.url]) == 0
    assert client.chat(["one", "--url", running.url]) == 0


def test_complete_prints_the_text(running: RunningRouter, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--url", running.url, "--temperature", "0", "--seed", "7", "--stop", "x", "--stop", "y"]
    assert client.complete(["one two three", *arguments]) == 0
    assert capsys.readouterr().out == " one two three\n"
    [request] = running.router.asked
    assert (request.temperature, request.seed, list(request.stop)) == (0.0, 7, ["x", "y"])
    assert not request.HasField("top_k") and not request.HasField("top_p"), "what is not set is the router's to choose"


@pytest.mark.parametrize("argv", [("complete", "one two"), ("status",)])
def test_an_answer_that_has_no_room_is_one_line(running: RunningRouter, argv: tuple[str, ...]) -> None:
    command = [sys.executable, "-P", "-m", "kvrelay", *argv, "--url", running.url]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (1, "kvrelay: cannot write the output: No space left on device\n")


def test_what_limits_sampling_is_sent(running: RunningRouter) -> None:
    assert client.complete(["hi", "--url", running.url, "--top-k", "40", "--top-p", "0.9"]) == 0
    assert [(request.top_k, request.top_p) for request in running.router.asked] == [(40, 0.9)]


def test_a_negative_seed_is_the_same_as_over_http(running: RunningRouter) -> None:
    assert client.complete(["hi", "--url", running.url, "--seed", "-1"]) == 0
    assert client.complete(["hi", "--url", running.url, f"--seed={-(2**63)}"]) == 0
    assert [request.seed for request in running.router.asked] == [2**64 - 1, 2**63]


def test_a_stop_string_is_sent_as_it_is(running: RunningRouter) -> None:
    wanted = ["\n", " the", "Hello, world", ",", '["a"]']
    assert client.complete(["hi", "--url", running.url, *(word for text in wanted for word in ("--stop", text))]) == 0
    assert list(running.router.asked[0].stop) == wanted


def test_an_empty_stop_string_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        client.complete(["hi", "--stop", "a", "--stop", ""])
    assert "--stop: String should have at least 1 character" in capsys.readouterr().err


def test_complete_reads_standard_input(
    running: RunningRouter, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert client.complete(["-", "--url", running.url, "--stats"]) == 0
    captured = capsys.readouterr()
    assert captured.out == " from a pipe\n"
    assert "prefill-0 -> decode-0; prompt of 9 tokens" in captured.err
    assert "1 block moved; 3 tokens" in captured.err


def test_an_empty_prompt_comes_by_standard_input(
    running: RunningRouter, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit):
        client.complete(["", "--url", running.url])
    assert "PROMPT is missing: The text to continue; - reads standard input, which may be empty." in (
        capsys.readouterr().err
    )
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert client.complete(["-", "--url", running.url]) == 0
    assert [request.prompt for request in running.router.asked] == [""]


@pytest.mark.parametrize("command", [client.complete, client.chat])
def test_an_answer_that_was_cut_off_is_told_from_one_that_has_ended(
    running: RunningRouter, capsys: pytest.CaptureFixture[str], command: Callable[[Sequence[str]], int]
) -> None:
    for limit, text, said in (("2", " one two\n", "(cut off here; "), ("3", " one two three\n", "")):
        assert command(["one two three", "--url", running.url, "--max-tokens", limit]) == 0
        captured = capsys.readouterr()
        assert captured.out == text
        assert captured.err.startswith(said) and bool(captured.err) == bool(said)


def test_a_terminal_that_lacks_a_character_shows_another(
    running: RunningRouter, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(shown, encoding="ascii"))
    assert client.complete(["caf\u00e9 \u4f60 !", "--url", running.url]) == 0
    assert shown.getvalue() == b" caf? ? !\n"
    assert capsys.readouterr().err == ""


def test_chat_keeps_the_conversation(
    running: RunningRouter, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nagain\n\nnever asked\n"))
    assert client.chat(["--url", running.url, "--system", "be kind"]) == 0
    assert capsys.readouterr().out == " hello\n again\n"
    roles = [[message.role for message in request.chat.messages] for request in running.router.asked]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"]]
    assert running.router.asked[1].chat.messages[2].content == " hello"


def test_chat_with_a_message_asks_once(running: RunningRouter, capsys: pytest.CaptureFixture[str]) -> None:
    assert client.chat(["hello", "--url", running.url]) == 0
    assert capsys.readouterr().out == " hello\n"


def test_the_routers_refusal_is_shown(running: RunningRouter, capsys: pytest.CaptureFixture[str]) -> None:
    assert client.complete(["hello", "--url", running.url, "--model", "missing"]) == 1
    assert "kvrelay complete: no model 'missing' here; there is 'echo'" in capsys.readouterr().err


def test_nothing_is_printed_before_an_error(running: RunningRouter, capsys: pytest.CaptureFixture[str]) -> None:
    client.complete(["hello", "--url", running.url, "--model", "missing"])
    assert capsys.readouterr().out == ""


def test_an_address_may_have_the_scheme_of_grpc(running: RunningRouter, capsys: pytest.CaptureFixture[str]) -> None:
    assert client.complete(["hello", "--url", f"grpc://{running.url}"]) == 0
    assert capsys.readouterr().out == " hello\n"


@pytest.mark.parametrize(
    "argv",
    [
        ("--seed", "18446744073709551616"),
        ("--seed", "-9223372036854775809"),
        ("--max-tokens", "9223372036854775808"),
        ("--timeout", "1e10"),
    ],
)
def test_a_number_that_cannot_be_sent_is_refused(argv: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        client.complete(["hello", *argv])
    assert f"{argv[0]}: Input should be" in capsys.readouterr().err


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8000", "127.0.0.1", "127.0.0.1:8001/v1", "localhost:", ":8001", "::1:8001"]
)
def test_an_address_that_is_none_is_refused_with_what_it_has_to_be(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        client.complete(["hello", "--url", url])
    errors = capsys.readouterr().err
    assert "--url" in errors and "host:port" in errors


@pytest.mark.parametrize("command", [client.status, client.complete])
def test_the_routers_own_words_are_shown_whatever_they_are_about(
    running: RunningRouter, capsys: pytest.CaptureFixture[str], command: Callable[[Sequence[str]], int]
) -> None:
    running.router.refusal = UnavailableError("no decode node can serve now: failed to connect to all addresses")
    assert command([*(["hello"] if command is client.complete else []), "--url", running.url]) == 1
    assert "no decode node can serve now: failed to connect to all addresses\n" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["status"], ["complete", "hello"]])
def test_a_server_that_is_no_router_is_told_from_one(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    assert getattr(client, argv[0])([*argv[1:], "--url", f"127.0.0.1:{port}"]) == 1
    server.stop(None).wait()
    assert f"what answers at 127.0.0.1:{port} is no router" in capsys.readouterr().err


def test_a_host_that_is_unknown_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert client.status(["--url", "host.invalid:8001"]) == 1
    assert "no router answers at host.invalid:8001" in capsys.readouterr().err


@pytest.mark.parametrize("data", [b"\xff\xfe", b"caf\xe9"])
@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_input_that_is_no_text_is_refused(
    running: RunningRouter,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    data: bytes,
    errors: str,
) -> None:
    """Python decodes standard input strictly or not, depending on the locale."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8", errors=errors))
    assert client.complete(["-", "--url", running.url]) == 2
    assert "kvrelay complete: the input is not UTF-8 text" in capsys.readouterr().err
    assert running.router.asked == []


def test_status_tells_whether_the_router_is_healthy(running: RunningRouter, capsys: pytest.CaptureFixture[str]) -> None:
    assert client.status(["--url", running.url]) == 0
    assert capsys.readouterr().out == f"{running.url}  serving\n  echo  up to 512 tokens of prompt and output\n"
    running.health.set(client.ROUTER_SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
    assert client.status(["--url", running.url]) == 1
    assert "not_serving" in capsys.readouterr().out


def test_status_gives_up_a_router_that_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts connections in its place
        url = f"127.0.0.1:{silent.getsockname()[1]}"
        assert client.status(["--url", url, "--timeout", "0.2"]) == 1
    assert f"kvrelay status: {url} has not answered within 0.2 seconds" in capsys.readouterr().err
    assert client.StatusSettings().timeout == 5.0


def test_what_a_router_says_does_nothing_to_the_terminal(
    running: RunningRouter, capsys: pytest.CaptureFixture[str]
) -> None:
    running.router.refusal = UnavailableError("not \x1b[2J now")
    assert client.complete(["a", "--url", running.url]) == 1
    assert capsys.readouterr().err == "kvrelay complete: not ?[2J now\n"
