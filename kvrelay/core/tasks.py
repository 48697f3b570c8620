"""Ending the tasks that a component has started on its event loop, and waiting: for the first of several things, or for
one that may not be interrupted."""

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any


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
