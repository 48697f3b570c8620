"""kvrelay and a peer in turn: every round starts each of them afresh and gives both the same requests.

Only one of the two runs at a time. Rounds differ in their seed, and in who begins.
"""

import asyncio
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.peers.base import Peer, PeerError
from bench.peers.processes import memory_bytes
from bench.peers.workloads import Figure, figures_of, settings_of
from kvrelay.bench.measure import measure


@dataclass(frozen=True, slots=True)
class Measurement:
    """One figure of one engine in one round."""

    engine: str
    round: int
    workload: str  # empty for figures of the server itself
    figure: Figure


@dataclass(frozen=True, slots=True)
class Comparison:
    """`directories` are the engines' own ones."""

    ours: Peer
    peer: Peer
    directories: Callable[[Peer], Path]
    model: Path
    vocab_size: int
    workloads: Sequence[str]
    scale: float

    def run(self, rounds: int, seed: int, report: Callable[[str], None]) -> list[Measurement]:
        """Raises PeerError when an engine does not serve or a request fails."""
        measurements: list[Measurement] = []
        for number in range(rounds):
            engines = (self.ours, self.peer) if number % 2 == 0 else (self.peer, self.ours)
            for engine in engines:
                for measurement in self._measure(engine, number, seed + number):
                    report(
                        f"round {number + 1}  {engine.name:<22}  {measurement.workload or '-':<2}  "
                        f"{measurement.figure.title:<24}  {measurement.figure.value:9.1f}"
                    )
                    measurements.append(measurement)
        return measurements

    def _measure(self, engine: Peer, number: int, seed: int) -> list[Measurement]:
        found: list[Measurement] = []
        with engine.serve(self.directories(engine), self.model) as server:
            found.append(Measurement(engine.name, number, "", Figure("ready after, s", server.ready_seconds)))
            for workload in self.workloads:
                settings = settings_of(workload, server, seed=seed, vocab_size=self.vocab_size, scale=self.scale)
                _, [result] = asyncio.run(measure(settings))
                if result.was_cut:
                    raise KeyboardInterrupt
                if result.summary.failures:
                    failure = result.summary.failures[0]
                    raise PeerError(
                        f"{engine.name}, {workload}: {failure.count} x {failure.kind}: {failure.first_message}"
                    )
                found += [Measurement(engine.name, number, workload, one) for one in figures_of(workload, result)]
            memory = sum(memory_bytes(process) for process in server.processes) / 1e9
            found.append(Measurement(engine.name, number, "", Figure("memory at the end, GB", memory)))
        return found


@dataclass(frozen=True, slots=True)
class Ratio:
    """Medians of both engines, and ours / theirs of every round that has both."""

    workload: str
    title: str
    higher_is_better: bool
    ours: float
    theirs: float
    by_round: tuple[float, ...]


def ratios(measurements: Sequence[Measurement], ours: str, peer: str) -> list[Ratio]:
    """In the order of the first round."""
    keys = dict.fromkeys((one.workload, one.figure.title, one.figure.higher_is_better) for one in measurements)
    found: list[Ratio] = []
    for workload, title, higher_is_better in keys:
        matching = [one for one in measurements if (one.workload, one.figure.title) == (workload, title)]
        own = {one.round: one.figure.value for one in matching if one.engine == ours}
        theirs = {one.round: one.figure.value for one in matching if one.engine == peer}
        by_round = tuple(own[number] / theirs[number] for number in own if number in theirs)
        medians = statistics.median(own.values()), statistics.median(theirs.values())
        found.append(Ratio(workload, title, higher_is_better, *medians, by_round))
    return found
