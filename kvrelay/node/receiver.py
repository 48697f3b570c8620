"""Pulls the KV of one request into its reserved blocks, as sources announce it.

Invariant: blocks are delivered to the engine in order and only after the connector verified them; every reserved block
is unpinned exactly once, when nothing writes to it any more.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from kv_connector.base import Block, KVConnector, Source
from kvrelay.core.errors import KVError
from kvrelay.engine.engine_thread import EngineThread
from kvrelay.engine.request import Admission

_logger = logging.getLogger(__name__)
_BLOCKS_PER_FETCH = 64  # the first blocks of a long prefix are delivered while the last ones still move


class Receiver:
    """One receiving request: `announce` what becomes available, then `end`; `run` returns what arrived."""

    def __init__(
        self,
        admission: Admission,
        connector: KVConnector,
        engine: EngineThread,
        *,
        block_size: int,
        fetch_timeout: float,
    ) -> None:
        self._request_id = admission.request_id
        self._first = admission.num_cached_tokens // block_size  # blocks of the prompt that were here already
        self._missing = [Block(block.block_id, block.block_hash, block.num_tokens) for block in admission.missing]
        self._connector = connector
        self._engine = engine
        self._fetch_timeout = fetch_timeout
        self._sources: list[tuple[Source, int]] = []
        self._ended = False
        self._pinned = True
        self._wake = asyncio.Event()

    def announce(self, source: Source, num_blocks: int) -> None:
        """`source` holds the prompt's first `num_blocks` blocks."""
        self._sources.append((source, num_blocks - self._first))
        self._wake.set()

    def end(self) -> None:
        """Nothing more will be announced."""
        self._ended = True
        self._wake.set()

    def discard(self) -> None:
        """Unpins what `run` has not: nobody wants these blocks, or its task was cancelled before it began. Idempotent;
        not while `run` is under way."""
        if self._pinned:
            self._pinned = False
            block_ids = [block.block_id for block in self._missing]
            self._engine.post(lambda engine: engine.unpin(block_ids))

    async def run(self) -> int:
        """Returns the number of prompt tokens received. Cancel to give up. Once begun it unpins the blocks in any
        case; whoever runs it as a task calls `discard` when that is done."""
        received = 0
        try:
            while received < len(self._missing):
                await self._wake.wait()
                self._wake.clear()
                received = await self._fetch_announced(received)
                if self._ended and not self._wake.is_set():
                    break
        finally:
            self.discard()
        return sum(block.num_tokens for block in self._missing[:received])

    async def _fetch_announced(self, received: int) -> int:
        """Fetches what has been announced behind the first `received` missing blocks; returns how many are here now."""
        sources, self._sources = self._sources, []
        for source, available in _latest(sources):
            while received < min(available, len(self._missing)):
                wanted = self._missing[received : min(available, received + _BLOCKS_PER_FETCH, len(self._missing))]
                fetched = await self._fetch(source, wanted)
                received += fetched
                if fetched < len(wanted):
                    break
        return received

    async def _fetch(self, source: Source, wanted: Sequence[Block]) -> int:
        try:
            result = await self._connector.fetch(source, wanted, timeout=self._fetch_timeout)
        except KVError as error:
            _logger.warning("request %s: nothing fetched from %s: %s", self._request_id, source.node_id, error)
            return 0
        fetched = result.num_leading_fetched
        if fetched:
            request_id = self._request_id
            start = self._missing.index(wanted[0])
            self._engine.post(lambda engine: engine.deliver(request_id, fetched))
            _logger.debug("request %s: blocks %d..%d from %s", request_id, start, start + fetched, source.node_id)
        if fetched < len(wanted):
            outcome = result.outcomes[fetched]
            _logger.warning(
                "request %s: block %d from %s: %s", self._request_id, fetched, source.node_id, outcome.value
            )
        return fetched


def _latest(sources: list[tuple[Source, int]]) -> list[tuple[Source, int]]:
    """The last announcement of each source; counts only grow."""
    return list({source: (source, available) for source, available in sources}.values())


def posted_unpin(engine: EngineThread) -> Callable[[Sequence[int]], None]:
    """`Engine.unpin`, for who is not on the engine's thread."""
    return lambda block_ids: engine.post(lambda core: core.unpin(block_ids))
