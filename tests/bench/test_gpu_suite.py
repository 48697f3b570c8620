"""The GPU suite's plumbing: what it makes of wrong results. Its self-test is in `tests/kernels/triton`."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from bench.gpu.case import Case, deviation
from bench.gpu.measure import Rates, Stopwatch, measure_rates
from bench.gpu.report import table

SUITE = Path(__file__).parents[2] / "bench" / "gpu_suite.py"
CPU = Stopwatch(torch.device("cpu"), 1)


def test_says_what_is_missing() -> None:
    no_card = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, str(SUITE)], env=no_card, capture_output=True, text=True, check=False)
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
