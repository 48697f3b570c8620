"""Runs sessions against a client and records every request.

1. First requests are built in the order of arrival, ahead of their time, so many at most. When these are ready, or all
   that are sent at the beginning if they fit in memory, the load begins.
2. A session waits for its time, then for a free place when concurrency is limited.
3. It sends its request and reads the whole answer; the record is made even when the request fails or is cut.
4. A conversation hears the answer and asks again; other sessions start afresh, after a failure not at once.

Building is done in slices, between which the loop takes the time of what arrives on other streams.
Invariant: when `run` returns or is cancelled, every request that was sent has exactly one record, and none is running.
"""

import asyncio
import time
from array import array
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import TypeAlias

from kvrelay.bench.base import CANCELLED, Answer, Client, Failure, RequestRecord
from kvrelay.bench.prompts import PromptBuilder
from kvrelay.bench.ready_request import ReadyRequest, SessionRequests
from kvrelay.bench.workloads import Session
from kvrelay.core.clock import Clock
from kvrelay.core.tasks import end_tasks

MAX_READY = 32  # first requests that wait for their time; one of 190,000 tokens takes about a megabyte
_MAX_TOKENS_AT_ONCE = MAX_READY * 190_000  # in the requests that are ready when the load begins
_TICK_SECONDS = 0.01
_PAUSE_AFTER_FAILURE_SECONDS = 1.0

_Built: TypeAlias = tuple[Session, SessionRequests, ReadyRequest | None]


class Load:
    """One run of sessions.

    `records` grows while it runs, and `num_failed` and `num_output_tokens` are sums over it: it may hold millions, too
    many to look at while others arrive. `running` holds the answers that are still coming. `longest_stall` is the
    longest time in seconds for which this process's loop did not turn, so that nothing that arrived was noticed.
    """

    def __init__(
        self, client: Client, builder: PromptBuilder, clock: Clock, *, max_concurrency: int | None = None
    ) -> None:
        self._client = client
        self._builder = builder
        self._clock = clock
        self._max_concurrency = max_concurrency
        self._places = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        self._free_since = deque([0.0] * (max_concurrency or 0))  # of each free place, the longest free one first
        self._num_ready = 0
        self._one_began = asyncio.Event()
        self._started, self._cpu_started = clock.now(), time.process_time()
        self._num_sent = 0
        self.records: list[RequestRecord] = []
        self.num_failed = 0
        self.num_output_tokens = 0
        self.running: dict[int, Answer] = {}
        self.longest_stall = 0.0

    @property
    def elapsed(self) -> float:
        """Returns the seconds since the load began."""
        return self._clock.now() - self._started

    @property
    def cpu_seconds(self) -> float:
        """Returns the processor time that this process has taken since the load began."""
        return time.process_time() - self._cpu_started

    async def run(self, sessions: Sequence[Session]) -> None:
        """Returns when the last session has ended. Cancelling it ends every request at the server."""
        arrivals = iter(sorted(enumerate(sessions), key=lambda numbered: numbered[1].at))
        first = await self._first(arrivals, num_at_once=sum(session.at <= 0 for session in sessions))
        self._started, self._cpu_started = self._clock.now(), time.process_time()
        watching = asyncio.create_task(self._watch_loop())
        try:
            async with asyncio.TaskGroup() as group:
                for session, requests, request in first:
                    group.create_task(self._run_session(session, requests, request))
                first.clear()
                for numbered in arrivals:
                    while self._num_ready >= MAX_READY:
                        self._one_began.clear()
                        await self._one_began.wait()
                    group.create_task(self._run_session(*await self._build(*numbered)))
        finally:
            await end_tasks(watching)

    async def _first(self, arrivals: Iterator[tuple[int, Session]], *, num_at_once: int) -> list[_Built]:
        """Builds the requests that are ready when the load begins. `num_at_once` of them are to be sent then, as far as
        there are places."""
        wanted = num_at_once if self._max_concurrency is None else min(num_at_once, self._max_concurrency)
        first: list[_Built] = []
        num_tokens = 0
        while len(first) < MAX_READY or (len(first) < wanted and num_tokens < _MAX_TOKENS_AT_ONCE):
            if (numbered := next(arrivals, None)) is None:
                break
            first.append(await self._build(*numbered))
            _, _, request = first[-1]
            num_tokens += 0 if request is None else request.num_prompt_tokens
        return first

    async def _build(self, number: int, session: Session) -> _Built:
        """Builds the first request of a session."""
        self._num_ready += 1
        requests = SessionRequests(self._client, self._builder, number, session)
        return session, requests, await requests.next_request()

    async def _run_session(self, session: Session, requests: SessionRequests, request: ReadyRequest | None) -> None:
        scheduled = session.at
        await self._sleep_until(scheduled)
        async with self._place() as free_since:
            self._num_ready -= 1
            self._one_began.set()
            while request is not None and (session.until is None or self.elapsed < session.until):
                answer = await self._run_request(request, scheduled, due=max(scheduled, free_since))
                if answer.failure is not None and session.is_conversation:
                    return
                pause = session.think_time if answer.failure is None else _PAUSE_AFTER_FAILURE_SECONDS
                scheduled = self.elapsed + pause
                requests.hear(answer)
                request = await requests.next_request()
                if request is not None:
                    await self._sleep_until(scheduled)

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[float]:
        """Waits for the place that a session holds from its first request to its last, and yields since when it was
        free."""
        if self._places is None:
            yield 0.0
            return
        async with self._places:
            free_since = self._free_since.popleft()
            try:
                yield free_since
            finally:
                self._free_since.append(self.elapsed)

    async def _sleep_until(self, at: float) -> None:
        """Returns at `at` seconds since the load began, never earlier: a loop's timers may be."""
        while (wait := at - self.elapsed) > 0:  # noqa: ASYNC110  # time is all that it waits for
            await asyncio.sleep(wait)

    async def _run_request(self, request: ReadyRequest, scheduled: float, *, due: float) -> Answer:
        index = self._num_sent
        self._num_sent += 1
        answer = self.running[index] = Answer(sent=self._clock.now())
        try:
            await request.send(answer)
        except asyncio.CancelledError:
            answer.failure = Failure(CANCELLED, "the run ended first")
            raise
        finally:
            del self.running[index]
            self._note(self._record(index, request, answer, scheduled, due))
        return answer

    def _note(self, record: RequestRecord) -> None:
        self.records.append(record)
        self.num_failed += record.failure is not None
        self.num_output_tokens += record.num_output_tokens

    def _record(self, index: int, request: ReadyRequest, answer: Answer, scheduled: float, due: float) -> RequestRecord:
        spec = request.spec
        finished = self._clock.now() if answer.finished is None else answer.finished
        if answer.failure is None and not answer.arrivals:
            answer.failure = Failure("no output", "the answer held no tokens")
        return RequestRecord(
            index=index,
            kind=spec.kind,
            scheduled=scheduled,
            due=due,
            sent=answer.sent - self._started,
            # A run may hold millions of them: in a tuple each would take four times as much memory.
            arrivals=array("d", (arrival - self._started for arrival in answer.arrivals)),
            finished=finished - self._started,
            num_drawn_tokens=request.num_prompt_tokens,
            num_prompt_tokens=request.num_prompt_tokens
            if answer.num_prompt_tokens is None
            else answer.num_prompt_tokens,
            num_output_tokens=answer.num_tokens,
            num_wanted_tokens=spec.max_tokens,
            counted_by="chunks" if answer.num_output_tokens is None else "usage",
            num_cached_tokens=answer.num_cached_tokens,
            failure=answer.failure,
            is_later_turn=request.is_later_turn,
        )

    async def _watch_loop(self) -> None:
        while True:
            before = self._clock.now()
            await asyncio.sleep(_TICK_SECONDS)
            self.longest_stall = max(self.longest_stall, self._clock.now() - before - _TICK_SECONDS)
