"""Tasks that a component begins on its event loop and ends when it is closed, and waiting: for the first of several
things, or for one that may not be interrupted."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

_logger = logging.getLogger(__name__)


def begin_task(
    work: Coroutine[Any, Any, None], *, name: str, on_failure: Callable[[BaseException], None] | None = None
) -> "asyncio.Task[None]":
    """Begins a task that nobody waits for before it is to end. An unforeseen error that ends it is logged at once, and
    given to `on_failure`."""
    task = asyncio.get_running_loop().create_task(work, name=name)
    task.add_done_callback(partial(_report, on_failure))
    return task


def _report(on_failure: Callable[[BaseException], None] | None, task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _logger.error("the task %r has failed", task.get_name(), exc_info=error)
        if on_failure is not None:
            on_failure(error)


async def end_tasks(*tasks: "asyncio.Task[Any] | None") -> None:
    """Cancels tasks and returns when all of them have ended. Their exceptions are dropped. None stands for a task that
    was never begun."""
    begun = [task for task in tasks if task is not None]
    for task in begun:
        task.cancel()
    await asyncio.gather(*begun, return_exceptions=True)


async def first_of(*waits: Awaitable[object]) -> int:
    """Returns the index of the one that ends first, or raises what that one has raised. The others are cancelled, and
    have ended by then."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end_tasks(*tasks)
    first = next(iter(done))
    first.result()
    return tasks.index(first)


async def uninterrupted(work: Coroutine[Any, Any, object]) -> None:
    """Returns when `work` has ended, even when the caller is cancelled, however often; that is raised then."""
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
