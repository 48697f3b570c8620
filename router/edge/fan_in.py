"""Several async generators merged into one, each run by a task of its own.

Invariant: however the merged generator ends, every source is closed and no task is left.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

from kvrelay.core.tasks import end_tasks

# At most this many items wait for a slow client. Then its sources wait, instead of filling the memory.
QUEUE_ITEMS = 64

T = TypeVar("T")


async def merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yields each item with the index of its source, as items come. If a source fails, the others are ended and its
    error is raised."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | None] = asyncio.Queue(QUEUE_ITEMS)
    closing = False

    async def pump(index: int, source: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(source) as items:
                async for item in items:
                    await queue.put((index, item))
        finally:
            if not closing:  # otherwise nobody reads the queue any more, and it may be full
                await queue.put(None)

    tasks: list[asyncio.Task[None]] = []
    try:
        for index, source in enumerate(sources):
            tasks.append(asyncio.create_task(pump(index, source)))
            await asyncio.sleep(0)  # a hundred of them would begin in one turn of the event loop
        num_running = len(tasks)
        while num_running:
            found = await queue.get()
            if found is not None:
                yield found
                continue
            num_running -= 1
            for task in tasks:
                if task.done():
                    task.result()
    finally:
        closing = True
        await end_tasks(*tasks)
