"""What the GPU suite makes of wrong results, failures and missing packages. Its self-test is in
`tests/kernels/triton`."""

import os
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench import gpu_suite
from bench.gpu import cluster_cases, model_cases
from bench.gpu.bars import BARS, Bar, judged
from bench.gpu.case import Case, deviation
from bench.gpu.cluster_cases import ClusterLoad, cluster_tasks
from bench.gpu.greedy import greedy_error, likeliest_error
from bench.gpu.measure import Rates, Repeat, Stopwatch, measure_rates, never_waiting, poisoned, unaffected
from bench.gpu.model_cases import KINDS, Kind, model_tasks
from bench.gpu.report import Record, Result, read_records, table
from bench.gpu.task import Task, run_tasks
from bench.local_cluster import ClusterAddress
from bench.random_model import write_random_model
from kvrelay.core.generation.outputs import TokenLogprobs
from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.engine.models.model_config import load_model_config
from kvrelay.offline.llm import LLM

SUITE = Path(__file__).parents[2] / "bench" / "gpu_suite.py"
CPU = Stopwatch(torch.device("cpu"), 1)
PROMPT = list(range(400, 420))


def test_says_what_is_missing() -> None:
    no_gpu = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, str(SUITE)], env=no_gpu, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "no GPU that torch can use; --self-test runs without one" in done.stderr


def test_an_unknown_part_names_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_suite.main(["--part", "attention,engines"])
    assert "--part: unknown: engines; there are: all, engine-8b, attention, layers, models" in capsys.readouterr().err


def test_wrong_results_are_seen() -> None:
    exact = torch.randn(8, 8, dtype=torch.float64)
    assert deviation(exact.float(), exact) < 1.0
    assert deviation(exact.float() * 1.001, exact) > 1.0
    assert deviation(torch.full((8, 8), float("nan")), exact) == float("inf")
    assert deviation(torch.tensor([1, 2]), torch.tensor([1, 2])) == 0.0
    assert deviation(torch.tensor([1, 2]), torch.tensor([1, 3])) == float("inf")


def test_a_case_is_measured_against_its_floor() -> None:
    case = Case(lambda: torch.ones(4), lambda: torch.full((4,), 2.0).double(), 100, 500, {"sum": lambda: None})
    result = case.measure("twice", CPU, Rates(copy=10.0, matmul=100.0))
    assert not result.is_right and result.floor_seconds == 10.0 and set(result.peers) == {"sum"}
    assert Rates(copy=10.0, matmul=20.0).floor_seconds(100, 500) == 25.0
    assert "NO" in table([result]) and "sum" in table([result])


def test_what_surrounds_a_kernel_is_not_timed() -> None:
    calls: list[str] = []

    def run() -> torch.Tensor:
        calls.append("run")
        return torch.ones(4)

    case = Case(run, lambda: torch.ones(4).double(), 100, timed=lambda: calls.append("timed"))
    assert case.measure("twice", CPU, Rates(copy=10.0, matmul=100.0)).is_right
    assert calls == ["run", "timed", "run"]


def test_rates_are_positive() -> None:
    rates = measure_rates(CPU, copy_bytes=1 << 16, matmul_size=16, dtype=torch.float32)
    assert rates.copy > 0 and rates.matmul > 0


def test_what_nobody_writes_is_seen() -> None:
    with poisoned():
        memory, codes = torch.empty(64), torch.empty(64, dtype=torch.int64)
    assert memory.isnan().all() and (codes == torch.iinfo(torch.int64).max).all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_nothing_waits_and_later_all_may(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[int | str] = [1]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with pytest.raises(ValueError), never_waiting(torch.device("cuda")):
        assert modes == [1, "error"]
        fail()
    assert modes == [1, "error", 1]


def test_greedy_tokens_may_be_near_ties() -> None:
    likeliest = TokenLogprobs(4, -2.0, 1, ((4, -2.0),))
    tie = TokenLogprobs(3, -2.02, 2, ((4, -2.0),))
    assert greedy_error([likeliest, likeliest], torch.float32) == 0.0
    assert greedy_error([likeliest, tie], torch.float32) > 1.0 > greedy_error([likeliest, tie], torch.bfloat16)
    assert greedy_error([likeliest, replace(tie, logprob=float("nan"))], torch.bfloat16) == float("inf")


def test_the_likeliest_tokens_are_compared_by_id() -> None:
    def row(*top: tuple[int, float]) -> list[TokenLogprobs]:
        return [TokenLogprobs(*top[0], 1, top)]

    expected = row((4, -2.0), (7, -2.3), (1, -2.31))
    assert likeliest_error(expected, expected, torch.float32) == 0.0
    tie = row((4, -2.0), (1, -2.305), (9, -2.31))  # the reference's own 9 may be as likely as its 1
    assert likeliest_error(tie, expected, torch.float32) > 1.0 > likeliest_error(tie, expected, torch.bfloat16)
    others = row((5, -2.0), (8, -2.3), (2, -2.31))
    assert likeliest_error(others, expected, torch.bfloat16) > 1.0
    nothing = row((4, float("nan")), (7, -2.3), (1, -2.31))
    assert likeliest_error(nothing, expected, torch.bfloat16) == float("inf")


def fail() -> Result:
    raise ValueError("no such thing")


def test_one_that_fails_takes_no_other_with_it(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    good = Result("good", 0.5, 2.0, 1.0, {"other": 4.0}, {"kernel": 1.5})
    again = Result("good", 0.5, 1.0, 1.0)
    record = Record(path, "layers")
    record.begin(Rates(1.0, 2.0), torch.device("cpu"), 3)
    begun: list[str] = []

    def on_begin() -> None:
        begun.append("one")

    run_tasks([Task("bad", fail), Task("good", lambda: good)], record, deadline=float("inf"), on_begin=on_begin)
    run_tasks([Task("late", fail)], record, deadline=0.0, on_begin=on_begin)
    assert len(begun) == 2  # what hangs is noticed case by case
    found = read_records(path)
    assert [(run["part"], run["seed"]) for run in found.runs] == [("layers", 3)]
    bad, kept, late = found.results
    assert bad.problem == "ValueError: no such thing" and not bad.is_right
    assert kept == good
    assert late.problem == "left out: time is up" and late.is_right
    Record(path, "layers").add(again)
    assert read_records(path).results[1] == again
    assert gpu_suite.main(["--show", str(path)]) == 1


def test_a_part_that_could_not_run_once_may_run_later(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    record = Record(path, "layers")
    record.begin(Rates(1.0, 2.0), torch.device("cpu"), 3)
    record.add(Result.failed("layers", "ended with exit code -9"))
    assert gpu_suite.main(["--show", str(path)]) == 1
    record.begin(Rates(1.0, 2.0), torch.device("cpu"), 3)
    record.add(Result("good", 0.5, 1.0, 1.0))
    assert [result.name for result in read_records(path).results] == ["good"]


@pytest.mark.parametrize(("ends_at", "is_right"), [(99.0, False), (101.0, True)])
def test_a_part_that_time_cuts_off_is_not_wrong(
    ends_at: float, is_right: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.jsonl"
    clock = iter([0.0, ends_at])
    monkeypatch.setattr(gpu_suite, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(sys, "executable", "false")  # stands for Python, and ends with 1
    gpu_suite._run_process("layers", path, Namespace(repeats=1, seed=0), 100.0)
    (found,) = read_records(path).results
    assert found.is_right == is_right
    assert found.problem == (
        "cut off: time is up" if is_right else "its process ended with status 1; what it said is above"
    )


def test_a_part_whose_package_is_missing_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "bench.gpu.cluster_cases", raising=False)
    monkeypatch.setitem(sys.modules, "kvrelay.bench.grpc_client", None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    path = tmp_path / "results.jsonl"
    assert gpu_suite.main(["--self-test", "--part", "cluster", "--output", str(path)]) == 0
    assert "left out: it needs the package 'kvrelay.bench.grpc_client'" in read_records(path).results[0].problem


def test_a_package_that_only_nodes_need_is_missed_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "kvrelay.node.process", raising=False)
    monkeypatch.setitem(sys.modules, "uvloop", None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    path = tmp_path / "results.jsonl"
    assert gpu_suite.main(["--self-test", "--part", "cluster", "--output", str(path)]) == 0
    assert [(one.name, one.problem) for one in read_records(path).results] == [
        ("cluster", "left out: it needs the package 'uvloop', which is not installed")
    ]


@dataclass(slots=True)
class FakeCluster:
    """A stand-in for clusters: it answers each one's requests with the next of `tokens`."""

    tokens: list[tuple[int, ...]]

    def start(self, model: str, options: Sequence[str]) -> AbstractContextManager[ClusterAddress]:
        return nullcontext(ClusterAddress("", "", model, 0))

    async def ask(self, address: str, load: ClusterLoad, seed: int) -> list[cluster_cases.Answered]:
        answered = cluster_cases.Answered(PROMPT, self.tokens.pop(0), 1.0)
        return [answered, answered]


def test_nodes_are_compared_with_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(str(write_random_model(tmp_path / "model", "tiny")), device="cpu", num_blocks=8)
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    right = llm.generate([PROMPT], greedy, progress=False)[0].outputs[0].token_ids
    wrong = tuple(token_id ^ 1 for token_id in right)

    def verdicts(*tokens: tuple[int, ...]) -> list[bool]:
        fake = FakeCluster(list(tokens))
        monkeypatch.setattr(cluster_cases, "local_cluster", fake.start)
        monkeypatch.setattr(cluster_cases, "_ask", fake.ask)
        load = ClusterLoad("cpu", "tiny", (len(PROMPT),), 4)
        tasks = cluster_tasks(load, ("staged", "direct"), Rates(1.0, 1.0), 0, tmp_path)
        return [task.run().is_right for task in tasks]

    assert verdicts(right, right) == [True, True, True, True]
    assert verdicts(wrong, wrong) == [False, False, False, False]
    assert verdicts(right, wrong) == [True, True, False, False]
    monkeypatch.setattr(cluster_cases, "greedy_error", lambda found, dtype: 0.5)
    assert verdicts(right, wrong) == [True, True, False, True]  # as likely, and yet another way gave others


@pytest.mark.parametrize(
    "field", ["seed", "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "logit_bias"]
)
def test_models_sample_with_parameters_that_matter(field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speak, plain = model_cases._speak, SamplingParams(seed=1)
    forgetful = [True, False]

    def forget(path: Path, device: Any, options: Any, asked: Sequence[SamplingParams]) -> Any:
        if forgetful.pop(0):
            greedy, sampled = asked
            asked = [greedy, replace(sampled, **{field: getattr(plain, field)})]
        return speak(path, device, options, asked)

    monkeypatch.setattr(model_cases, "_speak", forget)
    (task,) = model_tasks(KINDS[:1], CPU.device, tmp_path)
    assert not task.run().is_right


SCALED = [kind for kind in KINDS if kind.prequantized or "kv_cache_dtype" in kind.options]


@pytest.mark.parametrize("kind", SCALED, ids=[kind.name for kind in SCALED])
def test_models_with_wrong_scales_are_seen(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales of quantised weights are 5 % off, or values, as they would be with such a scale of an FP8 pool."""
    speak, is_wrong = model_cases._speak, [True, False]

    def speak_wrongly_first(path: Path, device: Any, options: Any, asked: Sequence[SamplingParams]) -> Any:
        model = with_wrong_scales(path, tmp_path / "wrong") if is_wrong.pop(0) else path
        return speak(model, device, options, asked)

    monkeypatch.setattr(model_cases, "_speak", speak_wrongly_first)
    (task,) = model_tasks([kind], CPU.device, tmp_path)
    assert not task.run().is_right


def with_wrong_scales(model: Path, target: Path) -> Path:
    shutil.copytree(model, target)
    weights = target / "model.safetensors"
    tensors = {
        name: 1.05 * tensor if name.endswith((".scales", "v_proj.weight")) else tensor
        for name, tensor in load_file(weights).items()
    }
    save_file(tensors, weights, metadata={"format": "pt"})
    return target


def test_quantised_models_are_what_they_are_called(tmp_path: Path) -> None:
    kinds = [kind for kind in KINDS if kind.prequantized]
    assert all(task.run().is_right for task in model_tasks(kinds, CPU.device, tmp_path))
    found = {path.name: load_model_config(path).quantization for path in tmp_path.iterdir()}
    assert {name: one and (one.format.value, one.group_index) for name, one in found.items()} == {
        "awq": ("awq", False),
        "gptq": ("gptq", False),
        "gptq_v2": ("gptq_v2", False),
        "gptq_desc_act": ("gptq", True),
    }


def test_bars_are_judged() -> None:
    bars = (Bar("a", "one", 0.8), Bar("b", "one", 0.6, "flash"), Bar("c", "two", 0.5))
    one = Result("one", 0.1, 2.0, 1.5, {"flash": 1.3})
    assert [verdict.split()[0] for verdict in judged([one], bars)] == ["MISSED", "passed", "not"]
    wrong = Result("two", 2.0, 1.0, 0.9)
    assert [verdict.split()[0] for verdict in judged([one, wrong], bars)] == ["MISSED", "passed", "WRONG"]
    assert len(list(judged([]))) == len(BARS)


def test_times_in_which_the_gpu_waited_for_the_host_do_not_count(caplog: pytest.LogCaptureFixture) -> None:
    class Event:
        def __init__(self, at: float) -> None:
            self.at = at

        def elapsed_time(self, end: "Event") -> float:
            return end.at - self.at

    def repeat(milliseconds: float, *, ahead: bool) -> Repeat:
        begin: Any = Event(1.0)
        end: Any = Event(1.0 + milliseconds)
        return Repeat(begin, end, host_was_ahead=ahead)

    late = [repeat(9.0, ahead=False), repeat(8.0, ahead=False)]
    assert [one.milliseconds for one in unaffected([*late, repeat(2.0, ahead=True)])] == [2.0]
    assert not caplog.records
    assert unaffected(late) == late
    assert "waited for the host" in caplog.text
