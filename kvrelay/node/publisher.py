"""Publishes newly named blocks in the order in which the engine named them, and reports whether they can be fetched.
Has the store that nodes share forget what is distrusted.

Invariant: `notify` callbacks run after every block enqueued before them was offered to the connector, and a block is
unpinned only after that. The store is told last what to forget: one that hangs holds up no callback of the same round.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kv_connector.base import KVConnector
from kvrelay.core.errors import KVError
from kvrelay.core.kv.block_hash import BlockHash
from kvrelay.core.kv.named_block import NamedBlock
from kvrelay.core.outages import Outages
from kvrelay.core.tasks import begin_task, end_tasks

_OUTAGE = "publishing"

Notify = Callable[[bool], None]
"""Hears whether the blocks that were enqueued with it are published, or the connector has failed."""


@dataclass(frozen=True, slots=True)
class _Batch:
    blocks: tuple[NamedBlock, ...]
    notify: tuple[Notify, ...] = ()
    distrusted: tuple[BlockHash, ...] = ()
    is_over: asyncio.Event | None = None  # set when all this is done


class Publisher:
    """A task that drains a queue of blocks. If the connector fails, peers do not find those blocks, and the callbacks
    hear of it, in the same order. `unpin` gets the ids of blocks that were offered to the connector; `outages` logs
    that it fails, and that it works again."""

    def __init__(self, connector: KVConnector, unpin: Callable[[Sequence[int]], None], outages: Outages) -> None:
        self._connector = connector
        self._unpin = unpin
        self._outages = outages
        self._queue: asyncio.Queue[_Batch] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    def start(self, on_failure: Callable[[BaseException], None]) -> None:
        """Starts the task. `on_failure` is called when an unforeseen error has ended it, after which nothing is
        published or unpinned any more."""
        self._task = begin_task(self._run(), name="publisher", on_failure=on_failure)

    def enqueue(self, blocks: Sequence[NamedBlock], notify: Sequence[Notify] = ()) -> None:
        if blocks or notify:
            self._queue.put_nowait(_Batch(tuple(blocks), tuple(notify)))

    def discard(self, names: Sequence[BlockHash]) -> None:
        """Has the store forget these blocks, once everything enqueued before is published."""
        if names:
            self._queue.put_nowait(_Batch((), distrusted=tuple(names)))

    async def drain(self) -> None:
        """Returns when everything enqueued so far is published and unpinned, its callbacks have run, and the store has
        been told what it is to forget; not what others enqueue meanwhile."""
        is_over = asyncio.Event()
        self._queue.put_nowait(_Batch((), is_over=is_over))
        await is_over.wait()

    async def close(self) -> None:
        """Ends the task and unpins the blocks in the queue without publishing them."""
        await end_tasks(self._task)
        while not self._queue.empty():
            batch = self._queue.get_nowait()
            self._unpin([block.block_id for block in batch.blocks])
            if batch.is_over is not None:
                batch.is_over.set()

    async def _run(self) -> None:
        while True:
            batches = [await self._queue.get()]
            # All batches together, so that a store that hangs costs its timeout only once.
            while not self._queue.empty():
                batches.append(self._queue.get_nowait())
            try:
                blocks = [block for batch in batches for block in batch.blocks]
                are_published = not blocks or await self._publish(blocks)
                for batch in batches:
                    for notify in batch.notify:
                        notify(are_published)
                if distrusted := dict.fromkeys(name for batch in batches for name in batch.distrusted):
                    await self._connector.discard(tuple(distrusted))
            finally:
                for batch in batches:
                    if batch.is_over is not None:
                        batch.is_over.set()

    async def _publish(self, blocks: Sequence[NamedBlock]) -> bool:
        """Offers blocks to the connector; tells whether it has taken any."""
        try:
            await self._connector.publish(list(dict.fromkeys(blocks)))  # requests with one prefix offer the same
        except KVError as error:
            self._outages.failed(_OUTAGE, "%d blocks are not published: %s", len(blocks), error)
            return False
        else:
            self._outages.succeeded(_OUTAGE)
            return True
        finally:
            self._unpin([block.block_id for block in blocks])
