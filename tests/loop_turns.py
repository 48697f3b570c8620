"""How often the event loop turns while something runs: others wait while it does not."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from kvrelay.core.tasks import end_tasks


@asynccontextmanager
async def counting_turns() -> AsyncIterator[Callable[[], int]]:
    """Yields a function that returns how often the loop has turned since the context was entered."""
    num_turns = 0

    async def count() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    try:
        yield lambda: num_turns
    finally:
        await end_tasks(counting)
