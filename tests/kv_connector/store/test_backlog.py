"""Blocks that wait are stored in order, once, by one task; an unforeseen error is not swallowed."""

import asyncio
import tracemalloc
from collections.abc import Sequence

import pytest

from kv_connector.store.backlog import Backlog, Offer
from tests.kv_connector.backends import blocks
from tests.kv_connector.settled import emptied


class Store:
    """A `store` that records its batches and returns when `gate` is open."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self, offers: Sequence[Offer]) -> None:
        self.batches.append([offer.generation for offer in offers])
        await self.gate.wait()
        if self.error is not None:
            raise self.error


def offers(generations: Sequence[int]) -> list[Offer]:
    chosen = blocks(len(generations))
    return [Offer(block, generation) for block, generation in zip(chosen, generations, strict=True)]


async def begun(store: Store) -> None:
    async with asyncio.timeout(10):
        while not store.batches:
            await asyncio.sleep(0)


async def test_blocks_added_meanwhile_wait_and_are_stored_with_their_newest_content() -> None:
    store = Store()
    backlog = Backlog(store)
    backlog.add(offers([1, 2]))
    await begun(store)
    backlog.add(offers([3, 4]))
    backlog.add(offers([5]))  # block 0 once more: it goes to the end
    store.gate.set()
    await emptied(backlog)
    assert store.batches == [[1, 2], [4, 5]]
    backlog.add(offers([6]))
    await emptied(backlog)
    assert store.batches[2:] == [[6]]
    await backlog.close()


async def test_a_block_that_is_offered_again_and_again_keeps_its_place() -> None:
    """Otherwise it would never have its turn while others come as fast as they are stored."""
    batches: list[Sequence[Offer]] = []
    goes_on = asyncio.Semaphore(0)

    async def store(batch: Sequence[Offer]) -> None:
        batches.append(batch)
        await goes_on.acquire()

    backlog = Backlog(store)
    hot = Offer(blocks(1, tag="hot")[0], 0)
    for turn in range(4):
        backlog.add([*(Offer(block, 0) for block in blocks(64, first_id=1 + 64 * turn)), hot])
        async with asyncio.timeout(10):
            while len(batches) <= turn:
                await asyncio.sleep(0)
        goes_on.release()  # the next batch is chosen after the blocks of the next turn were added
    assert hot in batches[1]
    await backlog.close()


async def test_many_blocks_are_stored_in_batches() -> None:
    store = Store()
    store.gate.set()
    backlog = Backlog(store)
    backlog.add(offers(range(200)))
    await emptied(backlog)
    assert [generation for batch in store.batches for generation in batch] == list(range(200))
    assert max(map(len, store.batches)) < 200
    await backlog.close()


async def test_a_batch_of_a_long_queue_takes_no_copy_of_the_queue() -> None:
    """Half a million blocks would otherwise be copied thousands of times, on the loop."""
    num_blocks, peaks = 20_000, []

    async def store(batch: Sequence[Offer]) -> None:
        peaks.append(tracemalloc.get_traced_memory()[1])
        await asyncio.sleep(0)
        tracemalloc.reset_peak()

    backlog = Backlog(store)
    waiting = offers(range(num_blocks))
    tracemalloc.start()
    try:
        backlog.add(waiting)
        queued = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        await emptied(backlog)
    finally:
        tracemalloc.stop()
    assert len(peaks) == -(-num_blocks // 64)
    assert max(peaks) < queued + num_blocks, "a pointer to each block would take eight times as much"
    await backlog.close()


async def test_the_end_of_the_queue_is_waited_for_and_what_is_added_meanwhile_too() -> None:
    store = Store()
    backlog = Backlog(store)
    await backlog.emptied()
    backlog.add(offers([1]))
    emptying = asyncio.create_task(backlog.emptied())
    await begun(store)
    backlog.add(offers([2]))
    assert not emptying.done()
    store.gate.set()
    async with asyncio.timeout(10):
        await emptying
    assert store.batches == [[1], [2]]
    await backlog.close()


async def test_closing_drops_the_blocks_that_wait() -> None:
    store = Store()
    backlog = Backlog(store)
    backlog.add(offers([1]))
    await begun(store)
    backlog.add(offers([2, 3]))
    assert await backlog.close() == 2
    assert store.batches == [[1]] and asyncio.all_tasks() == {asyncio.current_task()}


async def test_an_unforeseen_error_is_raised_by_the_next_add() -> None:
    store = Store()
    store.error = RuntimeError("a fault of ours")
    store.gate.set()
    backlog = Backlog(store)
    backlog.add(offers([1]))
    await emptied(backlog)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        backlog.add(offers([2]))
    await backlog.close()
