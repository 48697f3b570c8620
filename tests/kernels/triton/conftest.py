"""Collected only where Triton interprets, which it must be told before it is imported."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from triton.runtime import interpreter

collect_ignore_glob = [] if triton.knobs.runtime.interpret else ["test_*.py"]


@pytest.fixture(autouse=True)
def bfloat16_rounds_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """As every card does. The interpreter cuts the low half of a float32 off instead."""
    cut: Callable[..., Any] = interpreter._convert_float

    def convert(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return cut(data, source, target, rounding_mode)
        bits = data.view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(data), 0x7FC0, rounded).astype(np.uint16)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
