"""The GPU suite's self-test: every kernel is in it, is right, and is on record."""

import importlib
import os
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest import mock

import paged_kernels.gpu.device
import pytest
import torch
from paged_kernels.gpu.attention import AttentionCall, TritonBackend, plan_attention
from paged_kernels.gpu.launch import GpuTraits, KernelCall
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

from bench import gpu_suite
from bench.even_batch import even_batch
from bench.gpu import engine_cases, layer_cases, tuning
from bench.gpu.attention_cases import Batch, batch_tasks
from bench.gpu.layer_cases import Sizes, layer_tasks, sampling_tensors
from bench.gpu.measure import Rates, Stopwatch
from bench.gpu.parts import PARTS, Suite
from bench.gpu.report import Records, read_records
from bench.gpu.task import Task
from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.engine.gpu.runner import GpuRunner, GpuStep
from kvrelay.engine.models.decoder import DecoderForCausalLM
from kvrelay.engine.plan import SchedulerOutput
from kvrelay.engine.sampling.sampler import SamplingRow

SIZES = Sizes(3, 256, 64, 4, 2, 64, 1, 300, prequantized_rows=(3,))


def test_self_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    launched = set()
    get_launcher = InterpretedFunction.__getitem__

    def record_launch(kernel: Any, grid: Any) -> Any:
        launched.add(kernel.__name__)
        return get_launcher(kernel, grid)

    monkeypatch.setattr(InterpretedFunction, "__getitem__", record_launch)
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # told again by --self-test
    path = tmp_path / "results.jsonl"
    parts = "attention,layers,models,engine-1b,transfer"
    assert gpu_suite.main(["--self-test", "--part", parts, "--seed", "7", "--output", str(path)]) == 0
    assert os.environ["TRITON_INTERPRET"] == "1"
    assert launched == _kernels()
    _check_records(read_records(path), parts, capsys.readouterr().out)


def test_self_test_of_nodes_and_variants(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    assert (
        gpu_suite.main(["--self-test", "--part", "cluster,kernels-8b,flex,tune", "--seed", "7", "--output", str(path)])
        == 0
    )
    results = {result.name: result for result in read_records(path).results}
    assert all(result.error <= 1.0 and result.seconds > 0 and not result.problem for result in results.values())
    assert list(results)[:2] == ["1P+1D tiny staged: tokens", "1P+1D tiny staged, second token of 20"]
    assert {"tiny decode step 3 x 6, by kernel", "prefill 33 after 0, beside FlexAttention"} < results.keys()
    for kind, variants in (("decode 1 x 40", tuning.DECODE), ("prefill 33 after 0", tuning.PREFILL)):
        assert results[f"variants of {kind}"].parts.keys() == {str(variant) for variant in variants}


def test_a_variant_that_fails_or_differs_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    fails, differs, works = tuning.DECODE[:3]

    def varied(call: AttentionCall, variant: tuning.Variant, traits: GpuTraits) -> list[KernelCall]:
        if variant is fails:
            raise RuntimeError("out of shared memory")
        return [] if variant is differs else plan_attention(call, traits)

    monkeypatch.setattr(tuning, "DECODE", (fails, differs, works))
    monkeypatch.setattr(tuning, "varied", varied)
    watch = Stopwatch(torch.device("cpu"), 1)
    (task,) = tuning.tuning_tasks([(1, 15, 1)], 1, torch.float16, watch, Rates(1.0, 1.0))
    assert task.run().parts.keys() == {str(works)}


@pytest.mark.parametrize(("num_seqs", "splits"), [(1, 1), (1, 8), (16, 2), (64, 4)])
def test_variants_of_decodes_are_launched_as_they_say(num_seqs: int, splits: int) -> None:
    call, traits = call_of(num_seqs, 4095, 1), GpuTraits(132, 227 << 10)
    first, *merge = tuning.varied(call, tuning.Variant(32, 8, 5, splits=splits), traits)
    assert first.grid == (num_seqs, 8, splits) and len(merge) == (splits > 1)
    assert (first.constants["TILE"], first.num_warps, first.num_stages) == (32, 8, 5)


def test_variants_of_prefill_are_launched_as_they_say() -> None:
    (prefill,) = tuning.varied(call_of(1, 0, 512), tuning.Variant(128, 4, 2, rows=64), GpuTraits(132, 227 << 10))
    assert prefill.grid == (512 // 16 + 1, 8)
    assert (prefill.constants["ROWS"], prefill.constants["TOKENS"], prefill.constants["TILE"]) == (64, 16, 128)


def call_of(num_seqs: int, prefix: int, new: int) -> AttentionCall:
    device = torch.device("meta")
    metadata = even_batch(num_seqs, prefix, new, block_size=16, device=device)
    query = torch.empty(num_seqs * new, 32, 128, device=device)
    pool = torch.empty(metadata.block_tables.numel(), 8, 1, 2, 16, 128, device=device)
    return AttentionCall(query, query, pool, 0, metadata, 1.0, None, None)


def test_of_a_window_only_the_tokens_in_sight_are_work() -> None:
    def floor(window: int | None, *sequences: tuple[int, int]) -> float:
        batch = Batch(2, 1, 16, torch.float16, torch.float16, (*sequences, (0, 0)), window)
        (task,) = batch_tasks((batch,), Stopwatch(torch.device("cpu"), 1), Rates(1.0, 1.0))
        return task.run().floor_seconds

    assert floor(8, (100, 1), (40, 5), (3, 2)) == floor(None, (7, 1), (7, 5), (3, 2))


@dataclass(frozen=True, slots=True)
class OperationsWatch(Stopwatch):
    """A stopwatch that notes what torch computes where something is timed; kernels do nothing meanwhile."""

    found: list[set[str]] = field(default_factory=list)

    def seconds(self, run: Callable[[], object]) -> float:
        with Operations() as operations, pytest.MonkeyPatch.context() as patch:
            patch.setattr(InterpretedFunction, "__getitem__", lambda kernel, grid: lambda **arguments: None)
            run()
        self.found.append(operations.names)
        return 1.0


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_of_layers_only_kernels_are_timed() -> None:
    watch = OperationsWatch(torch.device("cpu"), 1)
    for task in layer_tasks(SIZES, torch.float16, watch, Rates(1.0, 1.0)):
        assert task.run().is_right
    assert len(watch.found) > 12
    plain = {"empty", "view", "slice", "select", "detach", "index_select"}  # the last one sorts inputs by group
    assert {frozenset(found - plain) for found in watch.found} <= {frozenset(), frozenset({"mm"})}  # of dense weights


@pytest.mark.parametrize("kind", ["min-p", "repetition penalty", "presence penalty", "frequency penalty", "logit bias"])
def test_sampling_parameters_matter(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(rows: Sequence[SamplingRow], device: torch.device) -> Any:
        plain = [replace(row, params=SamplingParams(seed=1, temperature=row.params.temperature)) for row in rows]
        return sampling_tensors(plain, device)

    torch.manual_seed(7)
    watch = Stopwatch(torch.device("cpu"), 1)
    (task,) = (task for task in layer_tasks(SIZES, torch.float16, watch, Rates(1.0, 1.0)) if task.name.endswith(kind))
    monkeypatch.setattr(layer_cases, "sampling_tensors", forget)
    assert not task.run().is_right


@pytest.mark.parametrize("name", ["rotary + write_kv", "rotary + write_kv to FP8"])
def test_kv_that_is_not_rotated_or_not_written_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write = TritonBackend.write_kv_rotary

    def unrotated(
        backend: TritonBackend, query: Tensor, key: Tensor, value: Tensor, angles: tuple[Tensor, Tensor], *where: Any
    ) -> None:
        write(backend, query, key, value, (torch.ones_like(angles[0]), torch.zeros_like(angles[1])), *where)

    def result() -> bool:
        watch = Stopwatch(torch.device("cpu"), 1)
        (task,) = (one for one in layer_tasks(SIZES, torch.float16, watch, Rates(1.0, 1.0)) if one.name == name)
        return task.run().is_right

    assert result()
    for wrong in (unrotated, lambda *_: None):
        monkeypatch.setattr(TritonBackend, "write_kv_rotary", wrong)
        assert not result()


@pytest.fixture
def engine_rows(tmp_path: Path) -> Iterator[Task]:
    """Yields the rows of the tiny engine that follow its start."""
    torch.manual_seed(7)
    rows = iter(PARTS["engine-1b"](Suite(torch.device("cpu"), 7, 1, tmp_path)))
    assert next(rows).run().is_right
    return rows


def test_each_row_of_the_engine_is_checked(engine_rows: Iterator[Task], monkeypatch: pytest.MonkeyPatch) -> None:
    assert next(engine_rows).name == "tiny launch of a decode step, without waiting"
    monkeypatch.setattr(TritonBackend, "attend", lambda self, query, *others, **options: torch.zeros_like(query))
    results = [task.run() for task in engine_rows]
    assert len(results) == 4 and not any(result.is_right for result in results)


def test_other_tokens_that_are_as_likely_are_wrong(
    engine_rows: Iterator[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = DecoderForCausalLM.compute_logits

    def shifted(model: DecoderForCausalLM, hidden: Tensor) -> Tensor:
        is_ours = isinstance(model.layers[0].attention.backend, TritonBackend)
        return compute(model, hidden).roll(int(is_ours), dims=-1)

    monkeypatch.setattr(DecoderForCausalLM, "compute_logits", shifted)
    (mixed,) = (task for task in engine_rows if "tokens of a prompt" in task.name)
    assert not mixed.run().is_right


def test_a_row_that_fails_spoils_no_other(engine_rows: Iterator[Task], monkeypatch: pytest.MonkeyPatch) -> None:
    _launch, decode, *others = engine_rows
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no result"):
        patch.setattr(engine_cases.EngineBench, "_step", mock.Mock(side_effect=RuntimeError("no result")))
        decode.run()
    assert others and all(task.run().is_right for task in others)


def test_what_a_failed_row_has_lost_is_no_others_loss(
    engine_rows: Iterator[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose_a_block(bench: engine_cases.EngineBench) -> int:
        assert bench._engine.pool.allocate(1)
        raise RuntimeError("out of resources")

    _launch, decode, *others = engine_rows
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of resources"):
        patch.setattr(engine_cases.EngineBench, "_step", lose_a_block)
        decode.run()
    assert others and all(task.run().is_right for task in others)


def test_launches_may_not_wait(engine_rows: Iterator[Task], monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    @contextmanager
    def note(device: torch.device) -> Iterator[None]:
        log.append("begin")
        yield
        log.append("end")

    launch = GpuRunner.launch

    def noted_launch(runner: GpuRunner, plan: SchedulerOutput) -> GpuStep:
        log.append("launch")
        return launch(runner, plan)

    monkeypatch.setattr(engine_cases, "never_waiting", note)
    monkeypatch.setattr(GpuRunner, "launch", noted_launch)
    assert next(engine_rows).run().is_right
    assert log == ["begin", *5 * ["launch"], "end"]


def _kernels() -> set[str]:
    modules = [
        importlib.import_module(module.name)
        for module in pkgutil.iter_modules(paged_kernels.gpu.device.__path__, "paged_kernels.gpu.device.")
    ]
    return {name for module in modules for name in vars(module) if name.endswith("_kernel")}


def _check_records(records: Records, parts: str, shown: str) -> None:
    assert [run["part"] for run in records.runs] == parts.split(",")
    for run in records.runs:
        versions: Any = run["versions"]
        assert run["seed"] == 7 and run["device"] and versions["triton"] and versions["torch"]
        assert datetime.fromisoformat(str(run["date"])).tzinfo is not None
        assert run["copy_bytes_per_second"] and run["matmul_operations_per_second"]
    for result in records.results:
        assert result.error <= 1.0 and result.seconds > 0 and not result.problem
        assert result.name in shown
    names = " ".join(result.name for result in records.results)
    for name in (
        "decode",
        "float8",
        "prefill",
        "decodes 2/1 x 16",
        "mixed 4/2 x 16 float16, float8_e4m3fn KV, window 8",
        "rms_norm",
        "silu_mul",
        "rotary + write_kv to FP8",
        "awq",
        "gptq 4 bits desc_act",
        "gptq_v2",
        "sampling",
        "model float32: against the processor",
        "tiny launch of a decode step, without waiting",
        "tiny decode step",
        "tiny first token",
        "tiny 2 x",
        "digests of 3 blocks",
        "KV of 128 KiB over shared_memory",
    ):
        assert name in names
    assert "not measured  decode step, 8B" in shown
