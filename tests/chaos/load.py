"""Clients that ask for one thing after the other, judge every answer, and sometimes leave."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.chaos.streams import Answer, Ask, Client, Leave
from tests.chaos.verdict import Verdict, judge

_LEAVE_WITHIN_CHUNKS = 40
_MAX_EXAMPLES = 20
_RETRY_SECONDS = 1.0  # what the router tells those that it refuses


@dataclass(slots=True)
class LoadReport:
    """Figures of what the clients saw. `longest_gap` and `longest_first` are the longest waits between two chunks and
    for a first one, in seconds. `requests` does not count those that were refused; `refusals` has the times of these,
    on the monotonic clock."""

    requests: int = 0
    refusals: list[float] = field(default_factory=list)
    aborted: int = 0
    verdicts: Counter[Verdict] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    longest_gap: float = 0.0
    longest_first: float = 0.0

    def add(self, ask: Ask, answer: Answer, expected: Answer, *, at: float) -> None:
        verdict, why = judge(answer, expected)
        self.requests += 1
        self.aborted += answer.left
        self.verdicts[verdict] += 1
        self.longest_gap = max(self.longest_gap, answer.gap)
        self.longest_first = max(self.longest_first, answer.first)
        if verdict is not Verdict.RIGHT and len(self.examples) < _MAX_EXAMPLES:
            self.examples.append(f"at {at:.1f} s, {ask.name} over {ask.protocol.value}: {verdict.value}: {why}")


async def undisturbed(client: Client, asks: Sequence[Ask]) -> dict[str, Answer]:
    """Sends one request at a time and returns the right answers by name. Raises AssertionError when one fails."""
    answers = {}
    for ask in asks:
        answer = answers[ask.name] = await client.ask(ask)
        assert not answer.error, f"{ask.name} fails without any disturbance: {answer.error}"
    return answers


class Load:
    """Clients that send requests drawn by `seed`. Half of the requests have a cache salt of their own, so that no node
    holds their blocks. A share of `aborts` of the clients leave at a random moment."""

    def __init__(
        self, client: Client, asks: Sequence[Ask], expected: Mapping[str, Answer], *, seed: int, aborts: float
    ) -> None:
        self.report = LoadReport()
        self._client = client
        self._asks = asks
        self._expected = expected
        self._random = random.Random(seed)
        self._aborts = aborts
        self._stop = asyncio.Event()
        self._began = time.monotonic()

    async def run(self, num_streams: int) -> None:
        """Runs so many clients at a time until `stop`, and returns when the last stream has ended."""
        async with asyncio.TaskGroup() as group:
            for _ in range(num_streams):
                group.create_task(self._ask_forever())

    def stop(self) -> None:
        self._stop.set()

    async def _ask_forever(self) -> None:
        while not self._stop.is_set():
            ask = self._random.choice(self._asks)
            salt = f"salt {self._random.random()}" if self._random.random() < 0.5 else ""
            leave = None
            if self._random.random() < self._aborts:
                leave = Leave(self._random.randrange(_LEAVE_WITHIN_CHUNKS), self._random.uniform(0, 0.05))
            answer = await self._client.ask(ask, salt=salt, leave=leave)
            if answer.refused:
                self.report.refusals.append(time.monotonic())
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            self.report.add(ask, answer, self._expected[ask.name], at=time.monotonic() - self._began)
