"""The GPU suite's self-test: every kernel is in it, is right, and is on record."""

import importlib
import os
import pkgutil
from datetime import datetime
from pathlib import Path
from typing import Any

import paged_kernels.triton_device
import pytest
from triton.runtime.interpreter import InterpretedFunction

from bench import gpu_suite
from bench.gpu.report import Records, read_records


def test_self_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    launched = set()
    get_launcher = InterpretedFunction.__getitem__

    def record_launch(kernel: Any, grid: Any) -> Any:
        launched.add(kernel.__name__)
        return get_launcher(kernel, grid)

    monkeypatch.setattr(InterpretedFunction, "__getitem__", record_launch)
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # told again by --self-test
    path = tmp_path / "results.jsonl"
    parts = "attention,layers,models,engine-1b,transfer,cluster,tune"
    assert gpu_suite.main(["--self-test", "--part", parts, "--seed", "7", "--output", str(path)]) == 0
    assert os.environ["TRITON_INTERPRET"] == "1"
    assert launched == _kernels()
    _check_records(read_records(path), parts, capsys.readouterr().out)


def _kernels() -> set[str]:
    modules = [
        importlib.import_module(module.name)
        for module in pkgutil.iter_modules(paged_kernels.triton_device.__path__, "paged_kernels.triton_device.")
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
        "write_kv",
        "awq",
        "gptq",
        "sampling",
        "model float32: against the processor",
        "tiny decode step",
        "tiny first token",
        "tiny 2 x",
        "digests of 3 blocks",
        "KV of 128 KiB over shared_memory",
    ):
        assert name in names
    assert "not measured  decode step, 8B" in shown
