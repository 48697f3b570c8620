"""The GPU suite's self-test: every kernel is in it, is right, and is on record."""

import importlib
import json
import os
import pkgutil
from datetime import datetime
from pathlib import Path
from typing import Any

import paged_kernels.triton_device
import pytest
from triton.runtime.interpreter import InterpretedFunction

from bench import gpu_suite


def test_self_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    launched = set()
    get_launcher = InterpretedFunction.__getitem__

    def record_launch(kernel: Any, grid: Any) -> Any:
        launched.add(kernel.__name__)
        return get_launcher(kernel, grid)

    monkeypatch.setattr(InterpretedFunction, "__getitem__", record_launch)
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # told again by --self-test
    path = tmp_path / "results.json"
    assert gpu_suite.main(["--self-test", "--seed", "7", "--output", str(path)]) == 0
    assert os.environ["TRITON_INTERPRET"] == "1"
    assert launched == _kernels()
    _check_record(json.loads(path.read_text()), capsys.readouterr().out)


def _kernels() -> set[str]:
    modules = [
        importlib.import_module(module.name)
        for module in pkgutil.iter_modules(paged_kernels.triton_device.__path__, "paged_kernels.triton_device.")
    ]
    return {name for module in modules for name in vars(module) if name.endswith("_kernel")}


def _check_record(record: Any, shown: str) -> None:
    assert record["seed"] == 7 and record["device"] and record["versions"]["triton"] and record["versions"]["torch"]
    assert datetime.fromisoformat(record["date"]).tzinfo is not None
    assert record["copy_bytes_per_second"] > 0 and record["matmul_operations_per_second"] > 0
    for result in record["results"]:
        assert result["error"] <= 1.0 and result["seconds"] > 0 and result["floor_seconds"] > 0
        assert result["name"] in shown
    names = " ".join(result["name"] for result in record["results"])
    for part in (
        "decode",
        "float8",
        "prefill",
        "rms_norm",
        "silu_mul",
        "write_kv",
        "awq",
        "gptq",
        "sampling",
        "tiny decode step",
        "tiny first token",
        "tiny 2 x",
        "digests of 3 blocks",
        "KV of 128 KiB over shared_memory",
    ):
        assert part in names
