"""The queue of blocks that are to be copied into a store. It delays nothing and pins nothing.

A block that loses its content before its turn is dropped; the store then lacks a copy that nobody has requested yet.
The queue never holds more than the pool's blocks.
Invariant: `store` is called by one task, one batch at a time, oldest first.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from kvrelay.core.kv.named_block import NamedBlock
from kvrelay.core.tasks import end_tasks

_BATCH_BLOCKS = 64


@dataclass(frozen=True, slots=True)
class Offer:
    """An offer of a block to the store. `generation`: the block's when it was published; once that has changed, the
    content is gone."""

    block: NamedBlock
    generation: int


class Backlog:
    """A queue, of which a background task gives everything to `store`."""

    def __init__(self, store: Callable[[Sequence[Offer]], Awaitable[object]]) -> None:
        self._store = store
        self._offers: OrderedDict[int, Offer] = OrderedDict()  # by block id, the next one first
        self._task: asyncio.Task[None] | None = None

    def add(self, offers: Sequence[Offer]) -> None:
        """Queues blocks; one that waits already keeps its place, unless its content has changed. Raises what `store`
        has raised since, which has ended the task; `store` has to handle every error that can be expected."""
        if self._task is not None and self._task.done():
            task, self._task = self._task, None
            task.result()
        for offer in offers:
            if self._offers.get(offer.block.block_id) == offer:
                continue
            self._offers[offer.block.block_id] = offer
            self._offers.move_to_end(offer.block.block_id)
        if self._offers and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="kv backlog")

    async def emptied(self) -> None:
        """Returns when `store` has returned for everything that was added, also meanwhile, or has raised."""
        while self._task is not None and not self._task.done():
            await asyncio.wait([self._task])

    async def close(self) -> int:
        """Drops the blocks that still wait, and ends the task. Returns how many these were, without those that `store`
        was given."""
        num_dropped = len(self._offers)
        self._offers.clear()
        await end_tasks(self._task)
        return num_dropped

    async def _run(self) -> None:
        while self._offers:
            num_blocks = min(_BATCH_BLOCKS, len(self._offers))
            await self._store([self._offers.popitem(last=False)[1] for _ in range(num_blocks)])
