"""A measurement by name, not begun yet, and the one way in which a part carries its own out.

Invariant: whatever becomes of a task is on record before the next one begins, and none takes the others with it.
"""

import gc
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from bench.gpu.report import Record, Result

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Task:
    name: str
    run: Callable[[], Result]


def run_tasks(
    tasks: Iterable[Task], record: Record, *, deadline: float, on_begin: Callable[[], None] = lambda: None
) -> None:
    """Until `deadline`, by the monotonic clock; what has not begun by then is on record as left out. `on_begin` is
    called before each."""
    lost = ""
    for task in tasks:
        if not lost and time.monotonic() < deadline:
            _logger.info("%s ...", task.name)
            on_begin()
            record.add(_result(task))
            lost = _loss_of_card()
        else:
            record.add(Result.failed(task.name, lost or "left out: time is up", is_wrong=bool(lost)))


def _result(task: Task) -> Result:
    try:
        return task.run()
    except Exception as error:  # of whatever kind: the other tasks are still worth running
        _logger.exception("%s failed", task.name)
        return Result.failed(task.name, f"{type(error).__name__}: {error}")
    finally:
        gc.collect()
        if torch.cuda.is_available():
            _empty_cache()


def attempt(runs: Mapping[str, Callable[[], float]]) -> dict[str, float]:
    """What those give that do not fail: others' implementations, and what only explains."""
    found = {}
    for name, run in runs.items():
        try:
            found[name] = run()
        except Exception:
            _logger.exception("%s did not run", name)
    return found


def _empty_cache() -> None:
    try:
        torch.cuda.empty_cache()
    except RuntimeError as error:
        _logger.warning("after a failure: %s", error)


def _loss_of_card() -> str:
    """An error of CUDA's that every later call would get, too; empty when all is well."""
    if not torch.cuda.is_available():
        return ""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return f"left out: the card was lost before ({error})".splitlines()[0]
    return ""
