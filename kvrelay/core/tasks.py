"""Ending what runs beside us on the loop."""

import asyncio
from typing import Any


async def end_tasks(*tasks: "asyncio.Task[Any] | None") -> None:
    """Cancels them and returns when all are over, whichever way: what they raise goes no further. None stands for a
    task that was never begun."""
    begun = [task for task in tasks if task is not None]
    for task in begun:
        task.cancel()
    await asyncio.gather(*begun, return_exceptions=True)
