"""The GPU suite leaves no kernel out."""

import importlib
import pkgutil
from typing import Any

import paged_kernels.triton_device
import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from bench.gpu.measure import Stopwatch
from bench.gpu_suite import run_suite


def test_every_kernel_is_in_the_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = set()
    get_launcher = InterpretedFunction.__getitem__

    def record(kernel: Any, grid: Any) -> Any:
        launched.add(kernel.__name__)
        return get_launcher(kernel, grid)

    monkeypatch.setattr(InterpretedFunction, "__getitem__", record)
    _, results = run_suite(Stopwatch(torch.device("cpu"), 1), tiny=True)
    assert all(result.is_right for result in results)
    modules = [
        importlib.import_module(module.name)
        for module in pkgutil.iter_modules(paged_kernels.triton_device.__path__, "paged_kernels.triton_device.")
    ]
    kernels = {name for module in modules for name in vars(module) if name.endswith("_kernel")}
    assert launched == kernels
