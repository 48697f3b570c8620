"""Finds the compiled extension, once: None where it was not built."""

import functools
import importlib
from types import ModuleType


@functools.cache
def load_extension() -> ModuleType | None:
    """`paged_kernels._native`, or None where it was not built."""
    try:
        return importlib.import_module("paged_kernels._native")
    except ModuleNotFoundError:
        return None
