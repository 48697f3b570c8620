"""kvrelay and a peer in turn: both get the same requests, and only one has any at a time.

Rounds differ in their seed, and in who begins.
"""

import asyncio
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.peers.base import Engine, PeerError, Server
from bench.peers.processes import PeakMemory, await_rest
from bench.peers.workloads import Figure, figures_of, settings_of
from kvrelay.bench.measure import measure


@dataclass(frozen=True, slots=True)
class Measurement:
    """One figure of one engine in one round."""

    engine: str
    round: int
    workload: str  # empty for figures of the server itself
    figure: Figure

    def __str__(self) -> str:
        what = f"{self.workload or '-':<2}  {self.figure.title:<24}"
        return f"round {self.round + 1}  {self.engine:<22}  {what}  {self.figure.value:9.2f}"


Report = Callable[[str], None]

_REST_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """`directories` are the engines' own ones."""

    ours: Engine
    peer: Engine
    directories: Callable[[Engine], Path]
    model: Path
    vocabulary: Mapping[str, object]
    workloads: Sequence[str]
    scale: float

    def run(self, rounds: int, seed: int, report: Report) -> list[Measurement]:
        """Every round starts both afresh. Raises PeerError when an engine does not serve or a request fails."""
        measurements: list[Measurement] = []
        for number in range(rounds):
            for engine in self._turns(number):
                for measurement in self._afresh(engine, number, seed + number):
                    report(str(measurement))
                    measurements.append(measurement)
        return measurements

    def run_together(self, rounds: int, seed: int, report: Report) -> list[Measurement]:
        """Both are started once and take turns at every workload, so that what else the machine does meets both; for
        engines that rest soon after their last request. Raises as `run`."""
        measurements: list[Measurement] = []
        with ExitStack() as stack:
            servers = {
                engine.name: stack.enter_context(engine.serve(self.directories(engine), self.model))
                for engine in (self.ours, self.peer)
            }
            for number in range(rounds):
                for workload in self.workloads:
                    for engine in self._turns(number):
                        await_rest(_REST_SECONDS)
                        figures = self._figures(engine, servers[engine.name], workload, seed + number)
                        for measurement in (Measurement(engine.name, number, workload, figure) for figure in figures):
                            report(str(measurement))
                            measurements.append(measurement)
        return measurements

    def _turns(self, number: int) -> tuple[Engine, Engine]:
        return (self.ours, self.peer) if number % 2 == 0 else (self.peer, self.ours)

    def _afresh(self, engine: Engine, number: int, seed: int) -> list[Measurement]:
        found: list[Measurement] = []
        with PeakMemory() as memory, engine.serve(self.directories(engine), self.model) as server:
            found.append(Measurement(engine.name, number, "", Figure("ready after, s", server.ready_seconds)))
            for workload in self.workloads:
                figures = self._figures(engine, server, workload, seed)
                found += [Measurement(engine.name, number, workload, figure) for figure in figures]
        found.append(Measurement(engine.name, number, "", Figure("peak memory, GB", memory.bytes / 1e9)))
        return found

    def _figures(self, engine: Engine, server: Server, workload: str, seed: int) -> list[Figure]:
        settings = settings_of(workload, server, self.vocabulary, seed=seed, scale=self.scale)
        _, [result] = asyncio.run(measure(settings))
        if result.was_cut:
            raise KeyboardInterrupt
        if result.summary.failures:
            failure = result.summary.failures[0]
            raise PeerError(f"{engine.name}, {workload}: {failure.count} x {failure.kind}: {failure.first_message}")
        return figures_of(workload, result)


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
