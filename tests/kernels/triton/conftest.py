"""Collected only where Triton interprets, which it must be told before it is imported."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from triton.runtime import interpreter

collect_ignore_glob = [] if triton.knobs.runtime.interpret else ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    """Raises UsageError if this folder was asked for by name and would be empty."""
    named = any(Path(one.split("::")[0]).resolve().is_relative_to(Path(__file__).parent) for one in config.args)
    if named and collect_ignore_glob:
        raise pytest.UsageError("Triton must interpret these: TRITON_INTERPRET=1 make pytest ARGS=tests/kernels/triton")


@pytest.fixture(autouse=True)
def bfloat16_rounds_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """As every GPU does. The interpreter cuts the low half of a float32 off instead."""
    cut: Callable[..., Any] = interpreter._convert_float

    def convert(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return cut(data, source, target, rounding_mode)
        bits = data.view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(data), 0x7FC0, rounded).astype(np.uint16)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
