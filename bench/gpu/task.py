"""Named measurements that have not begun yet, and how a part carries them out.

Invariant: the outcome of a task, whatever it is, is on record before the next one begins, and a task that fails does
not prevent the others."""

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
    """Runs the tasks until `deadline` of the monotonic clock. Those that have not begun by then, or follow the loss of
    the GPU, are recorded as left out. Calls `on_begin` before each task that runs."""
    lost = ""
    for task in tasks:
        if not lost and time.monotonic() < deadline:
            _logger.info("%s ...", task.name)
            on_begin()
            record.add(_result(task))
            lost = _loss_of_gpu()
        else:
            record.add(Result.failed(task.name, lost or "left out: time is up", is_wrong=bool(lost)))


def _result(task: Task) -> Result:
    try:
        return task.run()
    except Exception as error:  # of any kind: the other tasks are still worth running
        _logger.exception("%s failed", task.name)
        return Result.failed(task.name, f"{type(error).__name__}: {error}")
    finally:
        gc.collect()
        if torch.cuda.is_available():
            _empty_cache()


def attempt(runs: Mapping[str, Callable[[], float]]) -> dict[str, float]:
    """Returns the results of those that do not fail. For what may be missing: implementations of others, and
    explanations."""
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


def _loss_of_gpu() -> str:
    """Returns the error of CUDA that every later call would raise as well; empty when all is well."""
    if not torch.cuda.is_available():
        return ""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return f"left out: the GPU was lost before ({error})".splitlines()[0]
    return ""
