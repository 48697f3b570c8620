"""Finds the compiled extension, once: None where it was not built. It runs on the OpenMP threads that torch has."""

import functools
import importlib
import logging
from pathlib import Path
from types import ModuleType

_logger = logging.getLogger(__name__)

_MEMORY_MAP = Path("/proc/self/maps")


@functools.cache
def load_extension() -> ModuleType | None:
    """`paged_kernels._native`, ready to run on torch's threads, or None where it was not built."""
    try:
        native = importlib.import_module("paged_kernels._native")
    except ModuleNotFoundError:
        return None
    if not any(native.borrow_openmp_runtime(path) for path in _loaded_openmp_runtimes()):
        _logger.warning("torch has loaded no OpenMP runtime that the native kernels can share: they run on one thread")
    return native


def _loaded_openmp_runtimes() -> list[str]:
    """Paths of the OpenMP libraries in this process, torch's own first."""
    if not _MEMORY_MAP.exists():
        return []
    paths = {line.split(maxsplit=5)[-1] for line in _MEMORY_MAP.read_text().splitlines() if "omp" in line}
    libraries = [path for path in paths if Path(path).name.startswith(("libgomp", "libiomp", "libomp"))]
    return sorted(libraries, key=lambda path: ("torch" not in path, path))
