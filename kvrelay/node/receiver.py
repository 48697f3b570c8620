"""Pulls the KV of one request into its reserved blocks: from the sources that announce it, then from others.

Invariant: blocks are delivered to the engine in order and only after the connector verified them; every reserved block
is unpinned exactly once, when nothing writes to it any more. Every wait has a deadline or ends with the router's
stream, whose end makes the node cancel `run`.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass

from kv_connector.base import FetchOutcome, KVConnector
from kvrelay.core.errors import KVError, KVRelayError
from kvrelay.core.kv.source import KVSource
from kvrelay.core.node_report import FetchReport, RefusedBlock
from kvrelay.core.outages import Outages
from kvrelay.core.tasks import begin_task
from kvrelay.engine.engine_thread import EngineThread
from kvrelay.engine.step_result import Reservation
from kvrelay.node.absences import Absences
from kvrelay.node.fetches_under_way import FetchesUnderWay
from kvrelay.node.ladder import Ask, Ladder

_logger = logging.getLogger(__name__)
_DEADLINE_SHARE = 0.5  # of the time that the request has left
_GUESS_SHARE = 0.2  # of the fetch timeout, for a holder that has not announced anything itself


@dataclass(frozen=True, slots=True)
class ReceptionContext:
    """What all receptions of a node have in common. `fetch_timeout`: seconds that one fetch may take. `patience`:
    seconds that a reception waits for another source after it has reported missing blocks. `on_refused` is told of
    blocks that did not pass verification."""

    connector: KVConnector
    engine_thread: EngineThread
    fetches: FetchesUnderWay
    absences: Absences
    outages: Outages
    block_size: int
    fetch_timeout: float
    patience: float
    on_refused: Callable[[RefusedBlock], None]


class Receiver:
    """The reception of one request: `add_holder` and `announce` say what is available, `end` that nothing more will
    come; `run` fetches, in a task that `start` makes.

    `on_missing` gets the number of missing tokens when the announcing source has ended and no known source has them.
    `ends_at`: when the request ends, in loop time. A fetch takes at most half of what is left until then, so that the
    next source has a chance."""

    def __init__(
        self,
        context: ReceptionContext,
        reservation: Reservation,
        *,
        on_missing: Callable[[int], None],
        ends_at: float | None,
    ) -> None:
        self._context = context
        self._request_id = reservation.request_id
        self._first = reservation.num_cached_tokens // context.block_size  # blocks of the prompt that were here already
        self._missing = reservation.missing
        self._ladder = Ladder(len(self._missing))
        self._refused: set[int] = set()  # blocks of which a copy was refused
        self._ends_at = ends_at
        self._on_missing = on_missing
        self._quiet = False  # the announcing source has ended, and `on_missing` was not called since
        self._wait_seconds: float | None = None  # limits the wait for more, once `on_missing` was called
        self._ended = False
        self._pinned = True
        self._wake = asyncio.Event()

    def add_holder(self, source: KVSource, num_blocks: int) -> None:
        """Notes that `source` holds the prompt's first `num_blocks` blocks. Another source will announce them, too."""
        self._ladder.add_holder(source, num_blocks - self._first)
        self._wake.set()

    def announce(self, source: KVSource, num_blocks: int, *, ended: bool = False) -> None:
        """Notes that `source` has published the prompt's first `num_blocks` blocks; `ended`: it will publish no
        more."""
        self._ladder.announce(source, num_blocks - self._first)
        self._quiet = ended
        if ended:
            self._ladder.ask_store()
        self._wake.set()

    def end(self) -> None:
        """Notes that no source will announce anything more."""
        self._ended = True
        self._ladder.ask_store()
        self._wake.set()

    def start(
        self, reception: Coroutine[None, None, None], on_failure: Callable[[KVRelayError], None]
    ) -> "asyncio.Task[None]":
        """Starts a task of `reception`, which awaits `run`. However the task ends, the blocks are unpinned then; if it
        fails, `on_failure` gets the error for the client."""
        task = begin_task(
            reception,
            name=f"request {self._request_id}: receiving its KV",
            on_failure=lambda unforeseen: on_failure(KVRelayError("internal error")),
        )
        task.add_done_callback(lambda ended: self._discard())
        return task

    async def run(self) -> FetchReport:
        """Fetches until every block is here or no source is left; returns what was received. May be cancelled. Unpins
        the blocks in any case once it has begun."""
        try:
            while not self._ladder.is_complete:
                if (ask := self._ladder.next()) is not None:
                    await self._fetch(ask)
                elif self._ended:
                    break
                else:
                    await self._wait_for_more()
        finally:
            self._discard()
        arrived = self._missing[: self._ladder.num_leading]
        return self._ladder.report(sum(block.num_tokens for block in arrived))

    def _discard(self) -> None:
        """Unpins the blocks, once: the task of `run` may be cancelled before it begins."""
        if self._pinned:
            self._pinned = False
            block_ids = [block.block_id for block in self._missing]
            self._context.engine_thread.post(lambda engine: engine.unpin(block_ids))

    async def _wait_for_more(self) -> None:
        asks_others = self._quiet or self._wait_seconds is not None
        if asks_others and self._ladder.is_doubtful:  # another node may fetch what came of the bad block
            self.end()
            return
        if self._quiet:
            self._quiet = False
            self._on_missing(sum(block.num_tokens for block in self._missing[self._ladder.num_leading :]))
            self._wait_seconds = self._context.patience
        self._wake.clear()
        try:
            async with asyncio.timeout(self._wait_seconds):
                await self._wake.wait()
        except TimeoutError:
            message = "request %s: nobody sent the missing blocks; they are computed here"
            self._context.outages.failed("waiting for another source", message, self._request_id)
            self.end()

    async def _fetch(self, ask: Ask) -> None:
        outcomes = await self._outcomes(ask)
        self._report_refused(ask, outcomes)
        num_fetched = self._ladder.settle(ask, outcomes)
        if num_fetched:
            request_id = self._request_id
            self._context.engine_thread.post(lambda engine: engine.deliver(request_id, num_fetched))
        _logger.debug("request %s: %d more leading blocks from %s", self._request_id, num_fetched, _origin(ask))

    def _report_refused(self, ask: Ask, outcomes: Sequence[FetchOutcome]) -> None:
        """Reports the first block that a node has sent damaged, if there is one: those behind it follow from it. If
        another source's was refused before, it is rather our own memory that is damaged."""
        refused = [i for i, outcome in zip(ask.indices, outcomes, strict=True) if outcome is FetchOutcome.REFUSED]
        new = [index for index in refused if index not in self._refused]
        self._refused.update(refused)
        if new and ask.source is not None:
            self._context.on_refused(RefusedBlock(ask.source, self._missing[new[0]].block_hash))

    async def _outcomes(self, ask: Ask) -> Sequence[FetchOutcome]:
        """Fetches and returns one outcome per block of `ask`. Blocks that a holder was recently found not to have are
        not requested from it again, unless it has announced them itself."""
        source = ask.source
        outcomes = dict.fromkeys(ask.indices, FetchOutcome.MISSING)
        absences = self._context.absences
        requested = [
            index
            for index in ask.indices
            if source is None or not (ask.is_guess and absences.has(source, self._missing[index].block_hash))
        ]
        if not requested:
            return tuple(outcomes.values())
        wanted = [self._missing[index] for index in requested]
        timeout = self._timeout(ask)
        try:
            with self._context.fetches.fetch(_origin(ask), timeout):
                found = await self._context.connector.fetch(source, wanted, timeout=timeout)
            self._note(ask, found)
        except KVError as error:
            found = (FetchOutcome.FAILED,) * len(wanted)
            self._note(ask, found, str(error))
        outcomes.update(zip(requested, found, strict=True))
        if source is not None:
            arrived = zip(wanted, found, strict=True)
            absences.note(source, [block.block_hash for block, why in arrived if why is FetchOutcome.MISSING])
        return tuple(outcomes.values())

    def _note(self, ask: Ask, found: Sequence[FetchOutcome], error: str = "") -> None:
        """Logs that blocks of `ask` did not arrive, unless nobody has said that they are there. While a link is broken,
        that is so for every request."""
        may_lack = ask.is_guess or ask.source is None
        arrived = (FetchOutcome.FETCHED, FetchOutcome.MISSING) if may_lack else (FetchOutcome.FETCHED,)
        failures = [outcome.value for outcome in found if outcome not in arrived]
        name = f"fetching from {_origin(ask)}"
        if failures:
            self._context.outages.failed(
                name,
                "request %s: %d of %d blocks did not arrive from %s: %s",
                self._request_id, len(failures), len(found), _origin(ask), error or failures[0],
            )  # fmt: skip
        elif FetchOutcome.FETCHED in found:
            self._context.outages.succeeded(name)

    def _timeout(self, ask: Ask) -> float:
        timeout = self._context.fetch_timeout * (_GUESS_SHARE if ask.is_guess else 1.0)
        if self._ends_at is None:
            return timeout
        left = self._ends_at - asyncio.get_running_loop().time()
        return max(0.0, min(timeout, left * _DEADLINE_SHARE))


def _origin(ask: Ask) -> str:
    return "the store" if ask.source is None else ask.source.node_id


def deadline_after(timeout_ms: int) -> float | None:
    """Returns the request's deadline in loop time, given the milliseconds that it has left on arrival; 0 means that it
    has none, and gives None."""
    return asyncio.get_running_loop().time() + timeout_ms / 1000 if timeout_ms else None
