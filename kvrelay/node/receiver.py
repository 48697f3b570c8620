"""Pulls the KV of one request into its reserved blocks, as sources announce it, and from others what does not arrive.

Invariant: blocks are delivered to the engine in order and only after the connector verified them; every reserved block
is unpinned exactly once, when nothing writes to it any more. Every wait has a deadline or ends with the router's
stream, whose node cancels `run`.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from kv_connector.base import FetchOutcome, KVConnector
from kvrelay.core.errors import KVError
from kvrelay.core.kv_source import KVSource
from kvrelay.engine.engine_thread import EngineThread
from kvrelay.engine.request import Admission
from kvrelay.node.absences import Absences
from kvrelay.node.ladder import Ask, FetchReport, Ladder

_logger = logging.getLogger(__name__)
_DEADLINE_SHARE = 0.5  # of what the request has left
_GUESS_SHARE = 0.2  # of the fetch timeout, for a holder that has not announced anything itself


class Receiver:
    """One receiving request: `offer` and `announce` what is available, then `end`; `run` returns what arrived.

    `on_missing` is told the number of missing tokens when the announcing source has ended and nobody known has them;
    then `run` waits for more, `patience` seconds from one word to the next. `fetch_timeout` in seconds; nor does a
    fetch take more than half of what is left until `ends_at`, the request's end by the loop's time: who comes next on
    the ladder is to have a chance. `absences` are the node's."""

    def __init__(
        self,
        admission: Admission,
        connector: KVConnector,
        engine_thread: EngineThread,
        *,
        block_size: int,
        absences: Absences,
        fetch_timeout: float,
        patience: float,
        on_missing: Callable[[int], None] = lambda num_tokens: None,
        ends_at: float | None = None,
    ) -> None:
        self._request_id = admission.request_id
        self._first = admission.num_cached_tokens // block_size  # blocks of the prompt that were here already
        self._missing = admission.missing
        self._ladder = Ladder(len(self._missing))
        self._connector = connector
        self._engine_thread = engine_thread
        self._absences = absences
        self._fetch_timeout = fetch_timeout
        self._patience = patience
        self._ends_at = ends_at
        self._on_missing = on_missing
        self._quiet = False  # the source that was announcing has ended, and nobody was told of what is missing
        self._deadline: float | None = None  # of the wait for more, once somebody was told
        self._ended = False
        self._pinned = True
        self._wake = asyncio.Event()

    def offer(self, source: KVSource, num_blocks: int) -> None:
        """`source` holds the prompt's first `num_blocks` blocks, beside the one that will announce them."""
        self._ladder.offer(source, num_blocks - self._first)
        self._wake.set()

    def announce(self, source: KVSource, num_blocks: int, *, ended: bool = False) -> None:
        """`source` has published the prompt's first `num_blocks` blocks; `ended`: it will publish no more."""
        self._ladder.announce(source, num_blocks - self._first)
        self._quiet = ended
        if ended:
            self._ladder.ask_store()
        self._wake.set()

    def end(self) -> None:
        """Nothing more will be announced, by anybody."""
        self._ended = True
        self._ladder.ask_store()
        self._wake.set()

    def discard(self) -> None:
        """Unpins what `run` has not: nobody wants these blocks, or its task was cancelled before it began. Idempotent;
        not while `run` is under way."""
        if self._pinned:
            self._pinned = False
            block_ids = [block.block_id for block in self._missing]
            self._engine_thread.post(lambda engine: engine.unpin(block_ids))

    async def run(self) -> FetchReport:
        """Returns what was received. Cancel to give up. Once begun it unpins the blocks in any case; whoever runs it as
        a task calls `discard` when that is done."""
        try:
            while not self._ladder.is_complete:
                if (ask := self._ladder.next()) is not None:
                    await self._fetch(ask)
                elif self._ended:
                    break
                else:
                    await self._wait_for_more()
        finally:
            self.discard()
        arrived = self._missing[: self._ladder.num_leading]
        return self._ladder.report(sum(block.num_tokens for block in arrived))

    async def _wait_for_more(self) -> None:
        if self._quiet:
            self._quiet = False
            self._on_missing(sum(block.num_tokens for block in self._missing[self._ladder.num_leading :]))
            self._deadline = self._patience
        self._wake.clear()
        try:
            async with asyncio.timeout(self._deadline):
                await self._wake.wait()
        except TimeoutError:
            _logger.warning("request %s: nobody sent the missing blocks; they are computed here", self._request_id)
            self.end()

    async def _fetch(self, ask: Ask) -> None:
        outcomes = await self._outcomes(ask)
        num_fetched = self._ladder.settle(ask, outcomes)
        if num_fetched:
            request_id = self._request_id
            self._engine_thread.post(lambda engine: engine.deliver(request_id, num_fetched))
        origin = "the store" if ask.source is None else ask.source.node_id
        _logger.debug("request %s: %d more leading blocks from %s", self._request_id, num_fetched, origin)
        in_vain = [outcome.value for outcome in outcomes if outcome is not FetchOutcome.FETCHED]
        if in_vain and ask.source is not None:
            _logger.warning(
                "request %s: %d of %d blocks did not arrive from %s: %s",
                self._request_id, len(in_vain), len(outcomes), origin, in_vain[0],
            )  # fmt: skip

    async def _outcomes(self, ask: Ask) -> Sequence[FetchOutcome]:
        """One for each block asked for. A holder that announced nothing itself is not asked for what it has just been
        found not to have."""
        source = ask.source
        outcomes = [FetchOutcome.MISSING] * len(ask.indices)
        positions = [
            position
            for position, index in enumerate(ask.indices)
            if source is None or not (ask.is_guess and self._absences.has(source, self._missing[index].block_hash))
        ]
        if not positions:
            return outcomes
        wanted = [self._missing[ask.indices[position]] for position in positions]
        try:
            found = (await self._connector.fetch(source, wanted, timeout=self._timeout(ask))).outcomes
        except KVError as error:
            _logger.warning("request %s: nothing fetched: %s", self._request_id, error)
            found = (FetchOutcome.FAILED,) * len(wanted)
        for position, outcome in zip(positions, found, strict=True):
            outcomes[position] = outcome
        if source is not None:
            arrived = zip(wanted, found, strict=True)
            self._absences.note(source, [block.block_hash for block, why in arrived if why is FetchOutcome.MISSING])
        return outcomes

    def _timeout(self, ask: Ask) -> float:
        timeout = self._fetch_timeout * (_GUESS_SHARE if ask.is_guess else 1.0)
        if self._ends_at is None:
            return timeout
        left = self._ends_at - asyncio.get_running_loop().time()
        return max(0.0, min(timeout, left * _DEADLINE_SHARE))


def ends_at(timeout_ms: int) -> float | None:
    """By the loop's time, when a message that arrives now states what is left of its request; 0 states nothing."""
    return asyncio.get_running_loop().time() + timeout_ms / 1000 if timeout_ms else None


def posted_unpin(engine_thread: EngineThread) -> Callable[[Sequence[int]], None]:
    """Returns `Engine.unpin` for callers on other threads than the engine's."""
    return lambda block_ids: engine_thread.post(lambda engine: engine.unpin(block_ids))
