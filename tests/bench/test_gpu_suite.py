"""The GPU suite's plumbing: tiny shapes in Triton's interpreter, and what it makes of wrong results."""

import json
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
import torch

from bench.gpu.case import Case, deviation
from bench.gpu.measure import Rates, Stopwatch, measure_rates
from bench.gpu.report import table

SUITE = Path(__file__).parents[2] / "bench" / "gpu_suite.py"
CPU = Stopwatch(torch.device("cpu"), 1)


def run_suite(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SUITE), *arguments]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)


@pytest.mark.timeout(600)
def test_self_test(tmp_path: Path) -> None:
    done = run_suite("--self-test", "--seed", "7", "--output", str(tmp_path / "results.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "results.json").read_text())
    assert record["seed"] == 7 and record["device"] and record["versions"]["triton"] and record["versions"]["torch"]
    assert datetime.fromisoformat(record["date"]).tzinfo is not None
    assert record["copy_bytes_per_second"] > 0 and record["matmul_operations_per_second"] > 0
    for result in record["results"]:
        assert result["error"] <= 1.0 and result["seconds"] > 0 and result["floor_seconds"] > 0
        assert result["name"] in done.stdout
    names = " ".join(result["name"] for result in record["results"])
    for part in ("decode", "float8", "prefill", "rms_norm", "silu_mul", "write_kv", "awq", "gptq", "sampling"):
        assert part in names


def test_says_what_is_missing() -> None:
    done = run_suite(CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")
    assert done.returncode == 2 and "no GPU that torch can use; --self-test runs without one" in done.stderr


def test_wrong_results_are_seen() -> None:
    exact = torch.randn(8, 8, dtype=torch.float64)
    assert deviation(exact.float(), exact) < 1.0
    assert deviation(exact.float() * 1.001, exact) > 1.0
    assert deviation(torch.full((8, 8), float("nan")), exact) == float("inf")
    assert deviation(torch.tensor([1, 2]), torch.tensor([1, 2])) == 0.0
    assert deviation(torch.tensor([1, 2]), torch.tensor([1, 3])) == float("inf")


def test_a_case_is_measured_against_its_floor() -> None:
    case = Case("twice", lambda: torch.ones(4), lambda: torch.full((4,), 2.0).double(), 100, 500, {"sum": lambda: None})
    result = case.measure(CPU, Rates(copy=10.0, matmul=100.0))
    assert not result.is_right and result.floor_seconds == 10.0 and set(result.peers) == {"sum"}
    assert Rates(copy=10.0, matmul=20.0).floor_seconds(100, 500) == 25.0
    assert "NO" in table([result]) and "sum" in table([result])


def test_rates_are_positive() -> None:
    rates = measure_rates(CPU, copy_bytes=1 << 16, matmul_size=16, dtype=torch.float32)
    assert rates.copy > 0 and rates.matmul > 0
