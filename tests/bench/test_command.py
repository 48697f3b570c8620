"""`kvrelay bench` as a person uses it: help, tables, files, exit codes, and errors that say what to do."""

import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import repeat
from pathlib import Path
from threading import Event, Thread
from typing import Any
from unittest.mock import Mock

import grpc
import pytest

from kvrelay.bench import command, openai_client
from kvrelay.bench.command import bench
from tests.bench.servers import DONE, LAST, PIECE, USAGE, answering, in_a_thread

# Settings that a workload would ignore, and what the refusal says.
IGNORED = [
    (["trace", "--trace", "t", "--requests", "100"], "--requests has no effect with --workload trace: --limit takes"),
    (["trace", "--trace", "t", "--input-len", "5"], "--input-len has no effect with --workload trace: --trace FILE"),
    (
        ["trace", "--trace", "t", "--request-rate", "5"],
        "--request-rate has no effect with --workload trace: it has",
    ),
    (["mixed", "--requests", "5"], "--requests has no effect with --workload mixed: --duration says"),
    (["mixed", "--request-rate", "1"], "--request-rate has no effect with --workload mixed: --streams"),
    (["mixed", "--concurrency", "8"], "--concurrency has no effect with --workload mixed: --streams says how many"),
    (["random", "--turns", "2"], "--turns has no effect with --workload random: it belongs to --workload multi-turn"),
    (["random", "--prefix-len", "2"], "it belongs to --workload shared-prefix"),
    (["multi-turn", "--streams", "2"], "it belongs to --workload mixed"),
    (["shared-prefix", "--speedup", "2"], "it belongs to --workload trace"),
    (["random", "--trace", "t"], "it belongs to --workload trace"),
    (["random", "--limit", "2"], "it belongs to --workload trace or dataset"),
    (
        ["dataset", "--dataset", "p", "--requests", "5"],
        "--requests has no effect with --workload dataset: --limit takes",
    ),
    (["dataset", "--dataset", "p", "--input-len", "5"], "--input-len has no effect with --workload dataset: --dataset"),
    (["dataset", "--dataset", "p", "--tokenizer", "t"], "--tokenizer has no effect with --workload dataset"),
    (["dataset", "--dataset", "p", "--vocab-size", "9"], "--vocab-size has no effect with --workload dataset"),
    (["dataset", "--dataset", "p", "--prompt-format", "token_ids"], "--workload dataset sends texts"),
    (["dataset", "--concurrency", "8"], "--workload dataset needs --dataset FILE"),
]
LOAD = ["--vocab-size", "500", "--input-len", "4", "--output-len", "5", "--requests", "2"]


@pytest.fixture
def url() -> Iterator[str]:
    """Yields the URL of a server in a thread of its own, because the command runs its own loop."""
    found: list[str] = []
    started, done = Event(), Event()

    async def serve() -> None:
        async with answering((PIECE, PIECE, LAST, USAGE, DONE)) as address:
            found.append(address)
            started.set()
            await asyncio.to_thread(done.wait)

    with ExitStack() as stack:
        thread = Thread(target=asyncio.run, args=(serve(),))
        thread.start()
        stack.callback(thread.join)
        stack.callback(done.set)
        assert started.wait(20)
        yield found[0]


@pytest.mark.parametrize("command", ["serve", "latency", "throughput", "sweep"])
def test_help_gives_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench([command, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert f"usage: kvrelay bench {command}" in text
    assert f"  kvrelay bench {command} --" in text.replace("Example: ", "  "), "an example"


def test_without_a_known_command_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench([]) == 2
    assert bench(["--help"]) == 0
    assert bench(["thruput"]) == 2
    assert "there is no command 'thruput'; there are serve, latency" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["serve"], "Give --request-rate (per second) or --concurrency"),
        (["serve", "--workload", "trace"], "--workload trace needs --trace FILE"),
        *((["serve", "--workload", *argv], message) for argv, message in IGNORED),
        (["serve", "--concurrency", "1", "--burstiness", "2"], "--burstiness has no effect without --request-rate"),
        (["sweep", "--concurrencies", "1", "--burstiness", "2"], "--burstiness has no effect without --request-rates"),
        (["throughput", "--turns", "2"], "--turns has no effect with --workload random"),
        (["serve", "--workload", "mixed", "--duration", "inf"], "--duration: Input should be a finite number"),
        (["serve", "--request-rate", "1", "--burstiness", "inf"], "--burstiness: Input should be a finite number"),
        (["serve", "--request-rate", "nan"], "--request-rate: Input should be greater than 0"),
        (["latency", "--slo", "ttft=inf"], "METRIC=MILLISECONDS"),
        (["sweep"], "give either --request-rates or --concurrencies"),
        (["sweep", "--concurrencies", "1,0"], "must be positive"),
        (["latency", "--url", "localhost:8000"], "must begin with http://"),
        (
            ["latency", "--url", "http://me:secret@localhost:8000"],
            "no user and password; a key belongs in KVRELAY_API_KEY, got 'http://***@localhost:8000'",
        ),
        (["latency", "--slo", "fast=1"], "METRIC=MILLISECONDS"),
        (["latency", "--input-len", "5-x"], "write 512, or 128-512"),
        (["latency", "--json-file", "same", "--plot", "./same"], "--plot and --json-file name the same file"),
        (["latency", "--save-requests"], "--save-requests needs --json-file"),
        (["latency", "--tokenizer", "t", "--vocab-size", "9"], "--tokenizer has no effect with --vocab-size"),
        (["latency", "--url", "grpc://localhost:1", "--no-keep-alive"], "--no-keep-alive has no effect over gRPC"),
        (["latency", "--url", "grpc://localhost:1", "--extra-body", "{}"], "--extra-body has no effect over gRPC"),
        (["latency", "--extra-body", '{"n": 2'], "--extra-body: is not JSON: Expecting ',' delimiter"),
        (["latency", "--extra-body", '{"min_p": NaN}'], "--extra-body: is not JSON"),
        (["latency", "--extra-body", "[1]"], "--extra-body: must be a JSON object, got '[1]'"),
        (["latency", "--extra-body", '{"n": 1, "top_p": 1, "model": ""}'], "must not have model, top_p, which other"),
        (["sweep", "--concurrencies", "1", "--attainment", "0.5"], "--attainment has no effect without --slo"),
        (["latency", "--endpoint", "chat", "--prompt-format", "token_ids"], "a chat takes text only"),
        (["latency", "--input-length", "5"], "did you mean --input-len?"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench(argv)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as one from a file with a line end of Windows."""
    monkeypatch.setenv("KVRELAY_API_KEY", "secret\r")
    with pytest.raises(SystemExit) as ended:
        bench(["latency"])
    errors = capsys.readouterr().err
    assert ended.value.code == 2 and "secret" not in errors
    assert "--api-key: has a character that no header may hold, such as the end of a line" in errors


def test_a_missing_tokenizer_is_named_with_the_remedy(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(["latency", "--url", url, "--tokenizer", "/no/such/model"]) == 1
    errors = capsys.readouterr().err
    assert "--tokenizer: no tokenizer at '/no/such/model'" in errors
    assert "--vocab-size" in errors


def test_the_error_names_the_address_at_which_nobody_answers(
    unused_tcp_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(["latency", "--url", f"http://127.0.0.1:{unused_tcp_port}"]) == 1
    assert f"nothing answers at http://127.0.0.1:{unused_tcp_port}" in capsys.readouterr().err


def test_the_error_says_that_an_address_is_of_another_kind(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    server = grpc.server(ThreadPoolExecutor())
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    for wrong in (f"http://127.0.0.1:{port}", url.replace("http://", "https://")):
        assert bench(["latency", "--url", wrong]) == 1
        errors = capsys.readouterr().err
        assert f"what answers at {wrong} is not understood (" in errors
        assert "or with grpc:// for the gRPC port" in errors
    server.stop(None).wait()
    wrong = url.replace("http://", "grpc://")
    assert bench(["latency", "--url", wrong]) == 1
    assert f"what answers at {wrong} speaks HTTP; give the router's gRPC address" in capsys.readouterr().err


def test_the_error_says_that_an_address_answers_too_late(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(openai_client, "_CHECK_TIMEOUT_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent_url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert bench(["latency", "--url", silent_url]) == 1
    assert f"nothing answers at {silent_url} (it took too long); start the server" in capsys.readouterr().err


def test_a_run_prints_a_table_and_writes_its_files(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result, plot = tmp_path / "result.json", tmp_path / "plot.png"
    files = ["--json-file", str(result), "--save-requests", "--plot", str(plot)]
    assert bench(["serve", "--url", url, "--concurrency", "2", "--slo", "ttft=60000", *LOAD, *files]) == 0
    output = capsys.readouterr().out
    assert "2 requests completed, 0 failed" in output
    assert "100.0% of requests meet ttft <= 60000 ms" in output
    assert {line.split()[0] for line in output.splitlines() if line.startswith("  ")} >= {
        "ms",
        "TTFT",
        "ITL",
        "TPOT",
        "E2E",
    }
    written = json.loads(result.read_text())
    assert (written["command"], written["model"], written["settings"]["concurrency"]) == ("serve", "m", 2)
    [run] = written["runs"]
    assert run["summary"]["output_tokens"] == 10
    assert len(run["requests"]) == 2
    assert "api_key" not in written["settings"]
    assert plot.exists()


@pytest.mark.parametrize("argv", [["serve", "--request-rate", "inf"], ["sweep", "--request-rates", "inf"]])
def test_an_infinite_rate_is_a_text_in_the_file(argv: list[str], url: str, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    assert bench([*argv, "--url", url, *LOAD, "--json-file", str(result)]) == 0
    settings = json.loads(result.read_text(), parse_constant=pytest.fail)["settings"]
    assert settings.get("request_rate") == "inf" or settings["request_rates"] == ["inf"]


def test_a_sweep_names_the_same_knee_in_table_and_file(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result, plot = tmp_path / "result.json", tmp_path / "curve.png"
    argv = ["sweep", "--url", url, "--concurrencies", "1,2", "--slo", "ttft=60000", *LOAD]
    assert bench([*argv, "--json-file", str(result), "--plot", str(plot)]) == 0
    written = json.loads(result.read_text())
    rates = {run["label"]: run["summary"]["output_tokens_per_second"] for run in written["runs"]}
    knee = max(rates, key=lambda label: rates[label])
    assert (list(rates), written["knee"]) == (["1 at a time", "2 at a time"], knee)
    assert f"90% of the requests meet ttft <= 60000 ms: {knee}\n" in capsys.readouterr().out
    assert plot.exists()


def test_failures_are_shown_and_are_the_exit_code(capsys: pytest.CaptureFixture[str], url: str) -> None:
    argv = ["latency", "--url", f"{url}/nowhere", "--model", "m", "--warmup", "0", *LOAD]
    assert bench(argv) == 1
    assert "failed: 2 x http 404, the first: 404: Not Found" in capsys.readouterr().out


def test_what_a_server_says_costs_no_result(tmp_path: Path) -> None:
    """Its message need not be printable: half of an emoji, what the terminal lacks or what clears it."""
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "kvrelay", "bench", "latency", "--warmup", "0", *LOAD, "--json-file", str(result)]
    refusal = answering((b'{"error":{"message":"\\ud83d \\u4f60 \\u001b[2J"}}',), status=400)
    with in_a_thread(refusal) as url:
        environment = os.environ | {"PYTHONIOENCODING": "latin-1"}
        ended = subprocess.run([*command, "--url", url], env=environment, capture_output=True)
    assert (ended.returncode, ended.stderr) == (1, b"")
    assert b"failed: 2 x http 400, the first: ? ? ?[2J" in ended.stdout
    [run] = json.loads(result.read_text())["runs"]
    assert run["summary"]["failures"][0]["first_message"] == "\ud83d \u4f60 \x1b[2J"


def test_the_file_is_written_whether_or_not_the_table_can_be(url: str, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [sys.executable, "-u", "-m", "kvrelay", "bench", "latency", "--url", url, *LOAD]
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run([*command, "--json-file", str(result)], stdout=full, stderr=subprocess.PIPE)
    assert ended.returncode and b"No space left on device" in ended.stderr
    assert json.loads(result.read_text())["runs"][0]["summary"]["num_completed"] == 2


def test_what_is_interrupted_afterwards_takes_nothing_else_with_it(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By one more Ctrl-C."""
    result = tmp_path / "result.json"
    argv = ["latency", "--url", url, *LOAD, "--json-file", str(result), "--plot", str(tmp_path / "plot.png")]
    for step, is_whole in (("_plot", True), ("write_results", False)):
        result.unlink(missing_ok=True)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(command, step, Mock(side_effect=KeyboardInterrupt))
            bench(argv)
        assert "2 requests completed, 0 failed" in capsys.readouterr().out
        assert result.exists() == is_whole and (not is_whole or json.loads(result.read_text()))


@pytest.mark.parametrize("argv", [["latency"], ["sweep", "--concurrencies", "1,2"]])
def test_an_interrupt_of_the_warm_up_leaves_earlier_files_alone(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier = tmp_path / "result.json", tmp_path / "plot.png"
    for path in earlier:
        path.write_text("earlier")
    bodies: list[dict[str, Any]] = []

    def press() -> None:
        while not bodies:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    with in_a_thread(answering(repeat(PIECE), bodies=bodies)) as url:
        pressing = Thread(target=press)
        pressing.start()
        files = ["--json-file", str(earlier[0]), "--plot", str(earlier[1])]
        assert bench([*argv, "--url", url, *LOAD, *files]) == 130
        pressing.join()
    captured = capsys.readouterr()
    assert captured.out == "" and "interrupted before a request was measured: nothing is written" in captured.err
    assert [path.read_text() for path in earlier] == ["earlier"] * 2 and len(bodies) == 1


def test_a_run_that_is_told_to_end_writes_what_it_has(tmp_path: Path) -> None:
    """As `timeout` and batch systems do."""
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "kvrelay", "bench", "latency", "--warmup", "0", *LOAD, "--json-file", str(result)]
    bodies: list[dict[str, Any]] = []
    with (
        in_a_thread(answering(repeat(PIECE), bodies=bodies)) as url,
        subprocess.Popen([*command, "--url", url], stdout=subprocess.PIPE) as process,
    ):
        while not bodies:
            time.sleep(0.01)
        process.terminate()
        output, _ = process.communicate()
    assert (process.returncode, json.loads(result.read_text())["runs"][0]["was_cut"]) == (130, True)
    assert b"interrupted: these are the results so far" in output


def test_it_may_have_as_many_connections_as_the_system_allows(url: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard - 1, hard))
    try:
        assert bench(["throughput", "--url", url, *LOAD]) == 0
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_files_that_cannot_be_written_are_refused_before_the_measurement(
    tmp_path: Path, unused_tcp_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["latency", "--url", f"http://127.0.0.1:{unused_tcp_port}"]
    for flag in ("--json-file", "--plot"):
        assert bench([*command, flag, str(tmp_path / "missing" / "file")]) == 1
        errors = capsys.readouterr().err
        assert f"{flag}: cannot write {tmp_path}/missing/file: No such file or directory" in errors
        assert "nothing answers" not in errors
    assert bench([*command, "--json-file", str(tmp_path / "new")]) == 1
    assert "nothing answers" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [], "nothing was measured, and no empty file is left"
    link = tmp_path / "latest"
    link.symlink_to("later")
    assert bench([*command, "--json-file", str(link)]) == 1
    assert list(tmp_path.iterdir()) == [link], "a link is left alone"


def test_a_plot_is_drawn_even_when_the_json_file_fails(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "plot.png"
    assert bench(["latency", "--url", url, *LOAD, "--json-file", "/dev/full", "--plot", str(plot)]) == 1
    captured = capsys.readouterr()
    assert "2 requests completed, 0 failed" in captured.out
    assert "--json-file: cannot write /dev/full: No space left on device" in captured.err
    assert plot.exists()


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for package, argument in (("aiohttp", "--progress=off"), ("matplotlib", "--plot=plot.png")):
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
            patch.setitem(sys.modules, package, None)
            bench(["latency", argument])
        assert ended.value.code == 1
        assert f"needs {package}: pip install 'kvrelay[bench]'" in capsys.readouterr().err
