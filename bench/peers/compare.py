"""kvrelay and a peer in turn: both get the same requests, and only one has any at a time.

Rounds differ in their seed, and in which engine begins.
"""

import asyncio
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from bench.disturbances import Disturbances
from bench.peers.base import Engine, PeerError, Server
from bench.peers.processes import PeakMemory, await_rest
from bench.peers.work import Work, check_work, work_of
from bench.peers.workloads import ComparedFigure, figures_of, settings_of
from kvrelay.bench.measure import measure

_REST_SECONDS = 30.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Measurement:
    """One figure of one engine in one round. `flaws` are those of the run that it comes from (kvrelay/bench/result.py,
    bench/disturbances.py)."""

    engine: str
    round: int
    workload: str  # empty for figures of the server itself
    figure: ComparedFigure
    flaws: tuple[str, ...] = ()

    def __str__(self) -> str:
        what = f"{self.workload or '-':<2}  {self.figure.title:<24}"
        flaws = f"  ({', '.join(self.flaws)})" if self.flaws else ""
        return f"round {self.round + 1}  {self.engine:<22}  {what}  {self.figure.value:9.2f}{flaws}"


@dataclass(frozen=True, slots=True)
class Findings:
    """All that has been measured so far. A comparison fills it while it runs, so that a failure or Ctrl-C loses nothing
    that came before. `report` is given a line for every figure."""

    report: Callable[[str], None]
    measurements: list[Measurement] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)

    def add(self, measurement: Measurement) -> None:
        self.report(str(measurement))
        self.measurements.append(measurement)

    def add_work(self, entries: Sequence[Work]) -> None:
        """Raises PeerError when the other engine did different work for the same requests."""
        others = [entry for entry in self.work if entry.engine != entries[0].engine] if entries else []
        self.work.extend(entries)
        for entry in entries:
            check_work(entry, others)


def order_of_round(ours: T, peer: T, number: int) -> tuple[T, T]:
    """Returns both engines in the order in which a round takes them: ours begins every second round."""
    return (ours, peer) if number % 2 == 0 else (peer, ours)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two servers. `directory_of` maps each engine to its own directory. `common` are the settings of all workloads."""

    ours: Engine
    peer: Engine
    directory_of: Callable[[Engine], Path]
    model: Path
    common: Mapping[str, object]
    workloads: Sequence[str]
    scale: float

    def run(self, rounds: int, seed: int, findings: Findings) -> None:
        """Starts both engines afresh in every round, and once before, which is not counted: what an engine compiles
        then, it keeps. Raises PeerError when an engine does not serve, a request fails, or the engines do different
        work; UnavailableError when an engine does not answer; KeyboardInterrupt after Ctrl-C."""
        for engine in (self.ours, self.peer):
            with engine.serve(self.directory_of(engine), self.model) as server:
                findings.report(f"first start, not counted: {engine.name}, {server.ready_seconds:.2f} s")
        for number in range(rounds):
            for engine in order_of_round(self.ours, self.peer, number):
                self._run_afresh(engine, number, seed + number, findings)

    def run_together(self, rounds: int, seed: int, findings: Findings) -> None:
        """Starts both engines once and lets them take turns at every workload, so that whatever else the machine does
        affects both. It is for engines that rest soon after their last request. Raises what `run` raises."""
        with ExitStack() as stack:
            servers = {
                engine.name: stack.enter_context(engine.serve(self.directory_of(engine), self.model))
                for engine in (self.ours, self.peer)
            }
            for number in range(rounds):
                for workload in self.workloads:
                    for engine in order_of_round(self.ours, self.peer, number):
                        await_rest(_REST_SECONDS)
                        self._measure(engine, servers[engine.name], workload, number, seed + number, findings)

    def _run_afresh(self, engine: Engine, number: int, seed: int, findings: Findings) -> None:
        with PeakMemory() as memory, engine.serve(self.directory_of(engine), self.model) as server:
            findings.add(Measurement(engine.name, number, "", ComparedFigure("ready after, s", server.ready_seconds)))
            for workload in self.workloads:
                self._measure(engine, server, workload, number, seed, findings)
        findings.add(Measurement(engine.name, number, "", ComparedFigure("peak memory, GB", memory.bytes / 1e9)))

    def _measure(
        self, engine: Engine, server: Server, workload: str, number: int, seed: int, findings: Findings
    ) -> None:
        settings = settings_of(workload, server, self.common, seed=seed, scale=self.scale)
        disturbances = Disturbances()
        _, results = asyncio.run(measure(settings))
        if not results or results[0].was_cut:
            raise KeyboardInterrupt
        result = results[0]
        if result.summary.failures:
            failure = result.summary.failures[0]
            raise PeerError(f"{engine.name}, {workload}: {failure.count} x {failure.kind}: {failure.first_message}")
        may_end_early = not server.takes_ignore_eos
        findings.add_work(work_of(engine.name, number, workload, result.records, may_end_early=may_end_early))
        flaws = (*result.flaws, *disturbances.flaws())
        for figure in figures_of(workload, result):
            findings.add(Measurement(engine.name, number, workload, figure, flaws))


@dataclass(frozen=True, slots=True)
class Ratio:
    """A figure of both engines: their medians, and ours / theirs in every round that has both."""

    workload: str
    title: str
    higher_is_better: bool
    ours: float
    theirs: float
    by_round: tuple[float, ...]


def ratios(measurements: Sequence[Measurement], ours: str, peer: str) -> list[Ratio]:
    """Returns the figures that both engines have in at least one round, in the order of the first round. Nothing is
    compared with a figure of 0, such as the memory of an engine that ended before it was sampled."""
    keys = dict.fromkeys((one.workload, one.figure.title, one.figure.higher_is_better) for one in measurements)
    found: list[Ratio] = []
    for workload, title, higher_is_better in keys:
        matching = [one for one in measurements if (one.workload, one.figure.title) == (workload, title)]
        own = {one.round: one.figure.value for one in matching if one.engine == ours}
        theirs = {one.round: one.figure.value for one in matching if one.engine == peer}
        by_round = tuple(own[number] / theirs[number] for number in own if theirs.get(number))
        if by_round:
            medians = statistics.median(own.values()), statistics.median(theirs.values())
            found.append(Ratio(workload, title, higher_is_better, *medians, by_round))
    return found
