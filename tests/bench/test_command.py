"""`kvrelay bench` as a person uses it: help, tables, files, exit codes, and errors that say what to do."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Event, Thread

import pytest

from kvrelay.bench.command import bench, knee
from kvrelay.bench.result import RunResult
from kvrelay.bench.slo import Slos
from kvrelay.bench.summary import summarise
from tests.bench.records import record
from tests.bench.servers import DONE, LAST, PIECE, USAGE, answering

LOAD = ["--vocab-size", "500", "--input-len", "4", "--output-len", "5", "--requests", "2"]


@pytest.fixture
def url() -> Iterator[str]:
    """A server in a thread of its own: the command runs its own loop."""
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
def test_help_teaches(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench([command, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert f"usage: kvrelay bench {command}" in text
    assert f"  kvrelay bench {command} --" in text.replace("Example: ", "  "), "an example"


def test_overview_and_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench([]) == 2
    assert bench(["--help"]) == 0
    assert bench(["thruput"]) == 2
    assert "there is no command 'thruput'; there are serve, latency" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["serve"], "Give --request-rate (per second) or --concurrency"),
        (["serve", "--workload", "trace"], "--trace FILE belong together"),
        (["serve", "--workload", "mixed", "--request-rate", "1"], "has its own times"),
        (["sweep"], "give either --request-rates or --concurrencies"),
        (["sweep", "--concurrencies", "1,0"], "must be positive"),
        (["latency", "--url", "localhost:8000"], "must begin with http://"),
        (["latency", "--slo", "fast=1"], "METRIC=MILLISECONDS"),
        (["latency", "--input-len", "5-x"], "write 512, or 128-512"),
        (["latency", "--save-requests"], "--save-requests needs --json-file"),
        (["latency", "--endpoint", "chat", "--prompt-format", "token_ids"], "a chat takes text only"),
        (["latency", "--input-length", "5"], "did you mean --input-len?"),
    ],
)
def test_settings_that_can_not_be(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench(argv)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_no_tokenizer(url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert bench(["latency", "--url", url, "--tokenizer", "/no/such/model"]) == 1
    errors = capsys.readouterr().err
    assert "--tokenizer: no tokenizer at '/no/such/model'" in errors
    assert "--vocab-size" in errors


def test_nobody_answers(unused_tcp_port: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(["latency", "--url", f"http://127.0.0.1:{unused_tcp_port}"]) == 1
    assert f"nothing answers at http://127.0.0.1:{unused_tcp_port}" in capsys.readouterr().err


def test_table_and_files(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_sweep_table_and_curve(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "curve.png"
    argv = ["sweep", "--url", url, "--concurrencies", "1,2", "--slo", "ttft=60000", *LOAD, "--plot", str(plot)]
    assert bench(argv) == 0
    assert "the highest load at which 90% of the requests meet ttft <= 60000 ms:" in capsys.readouterr().out
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_failures_are_shown_and_are_the_exit_code(capsys: pytest.CaptureFixture[str], url: str) -> None:
    argv = ["latency", "--url", f"{url}/nowhere", "--model", "m", "--warmup", "0", *LOAD]
    assert bench(argv) == 1
    assert "failed: 2 x http 404, the first: 404: Not Found" in capsys.readouterr().out


def run_of(label: str, ttft: float) -> RunResult:
    records = [record(ttft, ttft + 1, index=index) for index in range(10)]
    return RunResult(label, summarise(records, slos=Slos.parse(["ttft=1000"])), {}, tuple(records), 0.0)


def test_the_knee_is_the_most_that_still_meets_the_slos() -> None:
    runs = [run_of("1/s", 0.9), run_of("2/s", 0.5), run_of("4/s", 1.5)]
    found = knee(runs, 0.9)
    assert found is not None and found.label == "2/s"
    assert knee([run_of("4/s", 1.5)], 0.9) is None
