"""Runs sessions against a client and records every request.

1. A session waits for its time, then for a free place when concurrency is limited.
2. It builds the prompt, sends it, and reads the whole answer; the record is made even when the request fails or is cut.
3. A conversation hears the answer and asks again; other sessions start afresh.

Invariant: when `run` returns or is cancelled, every request that was sent has exactly one record, and none is running.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from kvrelay.bench.base import CANCELLED, Answer, Client, Failure, RequestRecord, RequestSpec
from kvrelay.bench.prompts import Conversation, PromptBuilder
from kvrelay.bench.workloads import Session
from kvrelay.core.clock import Clock


class Load:
    """One run. `records` grows while it runs; `running` are the answers that are still coming."""

    def __init__(
        self, client: Client, builder: PromptBuilder, clock: Clock, *, max_concurrency: int | None = None
    ) -> None:
        self._client = client
        self._builder = builder
        self._clock = clock
        self._places: AbstractAsyncContextManager[None] = (
            nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        )
        self._started = 0.0
        self._num_sent = 0
        self.records: list[RequestRecord] = []
        self.running: dict[int, Answer] = {}

    @property
    def elapsed(self) -> float:
        """Seconds since the load began."""
        return self._clock.now() - self._started

    async def run(self, sessions: Sequence[Session]) -> None:
        """Until the last session ends. Cancelling it ends every request at the server."""
        self._started = self._clock.now()
        async with asyncio.TaskGroup() as group:
            for number, session in enumerate(sessions):
                group.create_task(self._run_session(number, session))

    async def _run_session(self, number: int, session: Session) -> None:
        if (wait := session.at - self.elapsed) > 0:
            await asyncio.sleep(wait)
        scheduled = session.at
        conversation = self._builder.conversation(str(number))
        async with self._places:
            for request in session.requests:
                if session.until is not None and self.elapsed >= session.until:
                    return
                if not session.is_conversation:
                    conversation = self._builder.conversation(str(number))
                answer = await self._run_request(request, conversation, scheduled)
                if answer.failure is not None and session.is_conversation:
                    return
                conversation.hear(answer)
                if session.think_time:
                    await asyncio.sleep(session.think_time)
                scheduled = self.elapsed

    async def _run_request(self, request: RequestSpec, conversation: Conversation, scheduled: float) -> Answer:
        index = self._num_sent
        self._num_sent += 1
        prompt = conversation.ask(request.segments)
        answer = self.running[index] = Answer(sent=self._clock.now())
        try:
            await self._client.generate(prompt, request.max_tokens, answer)
        except asyncio.CancelledError:
            answer.failure = Failure(CANCELLED, "the run ended first")
            raise
        finally:
            del self.running[index]
            self.records.append(self._record(index, request, answer, scheduled))
        return answer

    def _record(self, index: int, request: RequestSpec, answer: Answer, scheduled: float) -> RequestRecord:
        finished = self._clock.now() if answer.finished is None else answer.finished
        asked = sum(segment.length for segment in request.segments)
        if answer.failure is None and not answer.arrivals:
            answer.failure = Failure("no output", "the answer held no tokens")
        return RequestRecord(
            index=index,
            kind=request.kind,
            scheduled=scheduled,
            sent=answer.sent - self._started,
            arrivals=tuple(arrival - self._started for arrival in answer.arrivals),
            finished=finished - self._started,
            num_prompt_tokens=asked if answer.num_prompt_tokens is None else answer.num_prompt_tokens,
            num_output_tokens=answer.num_tokens,
            num_wanted_tokens=request.max_tokens,
            counted_by="chunks" if answer.num_output_tokens is None else "usage",
            num_cached_tokens=answer.num_cached_tokens,
            failure=answer.failure,
        )
