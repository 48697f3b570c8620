"""Ending the tasks that a component has started on its event loop."""

import asyncio
from typing import Any


async def end_tasks(*tasks: "asyncio.Task[Any] | None") -> None:
    """Cancels tasks and returns when all of them have ended. Their exceptions are dropped. None stands for a task that
    was never begun."""
    begun = [task for task in tasks if task is not None]
    for task in begun:
        task.cancel()
    await asyncio.gather(*begun, return_exceptions=True)
