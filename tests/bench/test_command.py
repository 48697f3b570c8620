"""`kvrelay bench` as a person uses it: help, tables, files, exit codes, and errors that say what to do."""

import asyncio
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any
from unittest.mock import Mock

import grpc
import pytest

from kvrelay.bench import command, openai_client
from kvrelay.bench.base import Failure
from kvrelay.bench.command import bench
from kvrelay.bench.knee import find_knee
from kvrelay.bench.report import render, render_sweep
from kvrelay.bench.result import RunResult
from kvrelay.bench.slo import Slos
from tests.bench.records import record, run_of
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
        (["latency", "--save-requests"], "--save-requests needs --json-file"),
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


def test_it_may_have_as_many_connections_as_the_system_allows(url: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard - 1, hard))
    try:
        assert bench(["throughput", "--url", url, *LOAD]) == 0
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def ten(label: str, ttft: float, *, sent: float = 0.0, **more: Any) -> RunResult:
    records = [record(sent + ttft, sent + ttft + 1, sent=sent, index=index) for index in range(10)]
    return run_of(*records, label=label, slos=Slos.parse(["ttft=1000"]), **more)


def test_the_knee_is_the_most_that_still_meets_the_slos() -> None:
    found = find_knee([ten("1/s", 0.9), ten("2/s", 0.5), ten("4/s", 1.5)], 0.9)
    assert found is not None and found.label == "2/s"
    assert find_knee([ten("4/s", 1.5)], 0.9) is None


def test_a_load_whose_figures_are_not_valid_is_no_knee() -> None:
    slow = ten("1/s", 0.9)
    late, cut = ten("2/s", 0.5, sent=0.2), ten("4/s", 0.4, was_cut=True)
    stalled, given_up = ten("8/s", 0.4, longest_stall=0.25), ten("9/s", 0.4, num_unsent=2)
    assert find_knee([slow, late, cut, stalled, given_up], 0.9) is slow
    waiting = ten("8 at a time", 0.5, sent=0.2, max_concurrency=8, limit_was_reached=True)
    assert find_knee([slow, waiting], 0.9) is waiting, "at the limit requests wait for their place on purpose"
    assert find_knee([slow, ten("8 at a time", 0.5, sent=0.2, max_concurrency=8)], 0.9) is slow, "nothing to wait for"


def test_a_sweeps_table_shows_goodput_and_says_what_is_wrong_with_a_load() -> None:
    slos = Slos.parse(["ttft=1000"])
    loads = [
        ten("1/s", 0.9, longest_stall=0.25, client_cpu_share=0.97),
        ten("2/s", 0.5, sent=0.2),
        ten("4/s", 1.5, was_cut=True),
    ]
    head, *rows = render_sweep(loads, loads[0], slos, 0.9).splitlines()
    assert head.split()[:5] == ["load", "req/s", "goodput", "meet", "SLOs"]
    assert [row.split()[:4] for row in rows[:3]] == [
        ["1/s", "5.26", "5.26", "100.0%"],
        ["2/s", "6.67", "6.67", "100.0%"],
        ["4/s", "4.00", "0.00", "0.0%"],
    ]
    assert [row.rpartition("  ")[2] for row in rows[:3]] == ["client stalled for 250 ms", "client late", "cut off"]
    cost = "this client took 0 us of processor time per output token"
    busy, idle = (f"{cost}, {share} of a core" for share in ("97%", "0%"))
    assert rows[4:10] == [
        "1/s: for up to 250 ms this client did not notice what arrived",
        f"1/s: {busy}",
        "2/s: a request was sent 200 ms late: this client could not keep up",
        f"2/s: {idle}",
        f"4/s: {idle}",
        "4/s: interrupted: these are the results so far",
    ]
    assert rows[11] == (
        "the highest load at which 90% of the requests meet ttft <= 1000 ms: 1/s; loads with a flaw were left out"
    )


def test_the_table_says_how_long_requests_waited_for_a_place() -> None:
    late, at_once = record(3.0, scheduled=1.0, sent=2.5), record(3.0, sent=2.5)
    note = "with --concurrency a request was sent 1500 ms after its time: no latency includes this wait"
    limited: dict[str, Any] = {"max_concurrency": 1, "limit_was_reached": True}
    assert note in render(run_of(late, **limited), None)
    assert "--concurrency" not in render(run_of(at_once, **limited), None)
    assert "--concurrency" not in render(run_of(late), None), "the client was late"


def test_chunks_may_be_several_tokens_and_say_less_about_an_early_end() -> None:
    short = record(1.0, wanted=4)
    assert "1 requests ended before the output length" in render(run_of(short), None)
    assert "1 requests had fewer chunks than tokens asked for" in render(
        run_of(replace(short, counted_by="chunks")), None
    )


def test_the_table_says_that_a_piece_is_several_tokens() -> None:
    several = replace(record(1.0, 2.0), num_output_tokens=8)
    note = "a piece held 3.0 output tokens on average: ITL is the time between pieces"
    assert note in render(run_of(several, record(1.0), record(failure=Failure("timeout", ""))), None)
    assert "a piece held" not in render(run_of(record(1.0, 2.0)), None)
    empty = replace(record(1.0, 2.0), num_output_tokens=1)
    assert "a piece held 0.50 output tokens on average: some had none" in render(run_of(empty), None)


def test_the_table_says_when_prompts_are_not_as_long_as_asked_for() -> None:
    longer = replace(record(1.0), num_prompt_tokens=7)
    note = "the server counted 1.20 times the prompt tokens that were asked for"
    assert note in render(run_of(longer, record(2.0)), None)
    assert "times the prompt tokens" not in render(run_of(record(1.0)), None)


def test_the_table_says_when_requests_are_fewer_than_may_run_at_a_time() -> None:
    turns = (record(1.0), record(2.0), record(3.0), record(4.0))
    few = run_of(*turns, max_concurrency=3, num_at_once=2)
    assert "2 requests or conversations: there were never 3 at a time" in render(few, None)
    assert few.flaws == ("too few",)
    enough, arriving = run_of(*turns, max_concurrency=2, num_at_once=2), run_of(*turns, max_concurrency=9)
    assert "never" not in render(enough, None) + render(arriving, None) and not enough.flaws + arriving.flaws


def test_the_table_and_the_verdict_of_a_sweep_do_not_contradict_each_other() -> None:
    slos = Slos.parse(["ttft=1000"])
    load = run_of(*(record(0.5 if number < 224 else 2.0) for number in range(250)), label="1/s", slos=slos)
    table = render_sweep([load], None, slos, 0.9)
    assert " 89.6% " in table and "no load meets ttft <= 1000 ms for 90% of its requests" in table
    assert "at which 99.9% of the requests" in render_sweep([load], load, slos, 0.999)


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
