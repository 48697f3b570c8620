"""Merged generators: all items, the first failure, and nothing left behind."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from router.edge.fan_in import QUEUE_ITEMS, merged


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
        for _ in range(QUEUE_ITEMS * 4):  # far more turns of the loop than the queue has places
            await asyncio.sleep(0)
        assert sum(source.num_taken for source in sources) <= QUEUE_ITEMS + 2 * num_sources, "the sources wait"
    assert all(source.closed for source in sources)
    assert asyncio.all_tasks() == before
