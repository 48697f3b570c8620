"""Merged generators: all items, the first failure, and nothing left behind."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from kvrelay.core.tasks import end_tasks
from router.edge.fan_in import QUEUE_ITEMS, merged
from tests.loop_turns import counting_turns


class Source:
    def __init__(self, num_items: int, error: Exception | None = None) -> None:
        self._num_items = num_items
        self._error = error
        self.closed = False
        self.num_taken = 0

    async def items(self) -> AsyncGenerator[int, None]:
        try:
            for i in range(self._num_items):
                await asyncio.sleep(0)
                self.num_taken += 1
                yield i
            if self._error is not None:
                raise self._error
        finally:
            self.closed = True


@pytest.mark.parametrize("num_sources", [1, 3])
async def test_all_items_in_each_source_s_order(num_sources: int) -> None:
    sources = [Source(QUEUE_ITEMS * 2) for _ in range(num_sources)]
    found = [item async for item in merged([source.items() for source in sources])]
    for index in range(num_sources):
        assert [value for source, value in found if source == index] == list(range(QUEUE_ITEMS * 2))
    assert all(source.closed for source in sources)


async def test_the_first_failure_ends_the_others() -> None:
    sources = [Source(10**9), Source(3, ValueError("broken")), Source(10**9)]
    with pytest.raises(ValueError, match="broken"):
        async with aclosing(merged([source.items() for source in sources])) as items:
            async for _ in items:
                pass
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("num_sources", [1, 2])
async def test_closing_while_the_queue_is_full_leaves_no_task(num_sources: int) -> None:
    sources = [Source(10**9) for _ in range(num_sources)]
    before = asyncio.all_tasks()
    async with aclosing(merged([source.items() for source in sources])) as items:
        await anext(items)
        for _ in range(1000):  # far more turns of the loop than the queue has places
            await asyncio.sleep(0)
        assert sum(source.num_taken for source in sources) <= QUEUE_ITEMS + 2 * num_sources, "the sources wait"
    assert all(source.closed for source in sources)
    assert asyncio.all_tasks() == before


async def test_the_loop_turns_between_the_beginnings_of_the_sources() -> None:
    """A source begins with work for the event loop: that of a hundred would keep everybody else waiting."""
    begun_at: list[int] = []
    async with counting_turns() as num_turns:

        async def source() -> AsyncGenerator[int, None]:
            begun_at.append(num_turns())
            yield 0

        assert len([item async for item in merged([source() for _ in range(30)])]) == 30
    assert len(set(begun_at)) == 30


async def test_closing_while_the_sources_begin_leaves_no_task() -> None:
    sources = [Source(10**9) for _ in range(30)]
    before = asyncio.all_tasks()
    first = asyncio.create_task(anext(merged([source.items() for source in sources])))
    while not sources[3].num_taken:
        await asyncio.sleep(0)
    num_taken_last = sources[-1].num_taken
    await end_tasks(first)
    assert num_taken_last == 0, "it had not begun"
    assert all(source.closed for source in sources if source.num_taken)
    assert asyncio.all_tasks() == before
