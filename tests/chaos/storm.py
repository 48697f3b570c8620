"""An abort storm: clients that leave at any point of their requests, and what remains of them."""

import asyncio
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tests.chaos.load import LoadReport
from tests.chaos.nodes import ChaosCluster, rss_of
from tests.chaos.streams import Answer, Ask, Leave

TOLERANCE_BYTES = 4 << 20  # a leak of some kilobytes per request grows by several times as much
_SENDING_SECONDS = 0.004  # a request that is given up in this time has hardly been read
_PREFILL_SECONDS = 0.05
_MOST_CHUNKS = 60


@dataclass(slots=True)
class Storm:
    """Clients that leave, `num_streams` at a time. `report` is about all requests."""

    cluster: ChaosCluster
    asks: Sequence[Ask]
    expected: Mapping[str, Answer]
    seed: int
    num_streams: int = 16
    report: LoadReport = field(default_factory=LoadReport)

    async def run(self, num_requests: int) -> dict[str, int]:
        """Sends the requests in two halves, each to its end, and returns by how many bytes each process has grown in
        the second one, by name."""
        chance = random.Random(self.seed)
        await self._rage(self._draw(chance, num_requests // 2))
        before = self._memory()
        await self._rage(self._draw(chance, num_requests // 2))
        return {name: memory - before[name] for name, memory in self._memory().items()}

    async def _rage(self, requests: Iterator[tuple[Ask, str, Leave]]) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(self.num_streams):
                group.create_task(self._ask_all(requests))
        for node in self.cluster.nodes.values():
            await node.load_when()

    async def _ask_all(self, requests: Iterator[tuple[Ask, str, Leave]]) -> None:
        for ask, salt, leave in requests:
            answer = await self.cluster.client.ask(ask, salt=salt, leave=leave)
            self.report.add(ask, answer, self.expected[ask.name], at=0.0)

    def _draw(self, chance: random.Random, count: int) -> Iterator[tuple[Ask, str, Leave]]:
        """Yields requests whose clients leave in turn before admission, during the prefill, at the first token, and in
        mid-stream."""
        for number in range(count):
            leave = (
                Leave(0, chance.uniform(0, _SENDING_SECONDS)),
                Leave(0, chance.uniform(0, _PREFILL_SECONDS)),
                Leave(1, 0.0),
                Leave(chance.randrange(2, _MOST_CHUNKS), chance.uniform(0, _SENDING_SECONDS)),
            )[number % 4]
            salt = f"salt {chance.random()}" if chance.random() < 0.5 else ""
            yield chance.choice(self.asks), salt, leave

    def _memory(self) -> dict[str, int]:
        processes = (self.cluster.router, *self.cluster.nodes.values())
        return {process.name: rss_of(process.pid) for process in processes}
