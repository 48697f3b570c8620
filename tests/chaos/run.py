"""Runs on real processes: first the right answers, then what is done to the cluster, then a look at what is left."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.catalogue import catalogue
from tests.chaos.faults import Injector, faults
from tests.chaos.load import Load, undisturbed
from tests.chaos.nodes import ChaosCluster, Setup, chaos_cluster
from tests.chaos.report import Report
from tests.chaos.rolling import rolling_restart
from tests.chaos.soak import growth, leaks, soak
from tests.chaos.storm import TOLERANCE_BYTES, Storm
from tests.chaos.streams import Answer, Ask
from tests.chaos.verdict import Verdict, differences
from tests.e2e.client import is_idle
from tests.e2e.cluster import link_model
from tests.e2e.processes import processes_of
from tests.redis_server import RedisServer

_logger = logging.getLogger(__name__)
_PROGRESS_SECONDS = 10.0
_IDLE_SECONDS = 60.0
_REFUSAL_SECONDS = 2.0  # that the answer to a client may take
_SOAK_TOKENS = 32  # of an output at most: what leaks, leaks with every request
_OWN_FAULTS = (" ERROR ", " CRITICAL ", "Traceback")


@dataclass(frozen=True, slots=True)
class Plan:
    """A run with faults for `seconds`, at most `most_after` seconds apart, each at most `most_fault_seconds` long."""

    connector: str
    seed: int
    seconds: float = 180.0
    num_streams: int = 10
    max_tokens: int = 160
    aborts: float = 0.2
    most_after: float = 3.0
    most_fault_seconds: float = 10.0


@dataclass(frozen=True, slots=True)
class Stage:
    """A cluster, and what it answered before anything was done to it."""

    cluster: ChaosCluster
    asks: Sequence[Ask]
    expected: Mapping[str, Answer]

    def load(self, *, seed: int, aborts: float = 0.0) -> Load:
        return Load(self.cluster.client, self.asks, self.expected, seed=seed, aborts=aborts)


@asynccontextmanager
async def stage(directory: Path, report: Report, *, max_tokens: int) -> AsyncIterator[Stage]:
    """Yields a fresh cluster over the report's connector. At the end stops all of it and reports what is left. Logs
    stay in `directory`."""
    began = time.monotonic()
    asks = catalogue(max_tokens=max_tokens)
    model = link_model(directory)
    with contextlib.ExitStack() as stack:
        server = RedisServer(directory) if report.connector == "redis" else None
        if server is not None:
            stack.callback(server.stop)
        setup = Setup(model, directory, report.connector, server)
        async with chaos_cluster(setup) as cluster:
            expected = await undisturbed(cluster.client, asks)
            _logger.info("%s: undisturbed answers after %.1f s", report.connector, time.monotonic() - began)
            if num_expired := await cluster.num_expired_leases():
                report.problems.append(f"{num_expired} leases were not released before they expired")
            yield Stage(cluster, asks, expected)
            await look_around(cluster, report)
            report.problems += [f"{name} ended with {code}" for name, code in (await cluster.stop()).items() if code]
            report.processes_left = len(processes_of(model))
        report.segments_left = len(list(setup.pools.iterdir()))
    report.errors_logged = _errors_logged(directory)
    report.seconds = time.monotonic() - began


async def run_chaos(plan: Plan, directory: Path) -> Report:
    report = Report("chaos", plan.connector, plan.seed)
    async with stage(directory, report, max_tokens=plan.max_tokens) as on:
        await disturb(plan, on, report)
    return report


async def run_storm(plan: Plan, num_requests: int, directory: Path) -> Report:
    """Runs clients that leave, and measures by how much every process grows during the second half of them."""
    report = Report("abort storm", plan.connector, plan.seed)
    async with stage(directory, report, max_tokens=plan.max_tokens) as on:
        storm = Storm(on.cluster, on.asks, on.expected, plan.seed)
        report.growth = await storm.run(num_requests)
        report.problems += [f"{name} has grown" for name, grown in report.growth.items() if grown > TOLERANCE_BYTES]
        if num_expired := await on.cluster.num_expired_leases():
            report.problems.append(f"{num_expired} leases of clients that left have expired")
        note(storm, report)
    return report


async def run_soak(plan: Plan, directory: Path) -> Report:
    """Runs load without faults, and measures by how much every process grows during the second half of it."""
    report = Report("soak", plan.connector, plan.seed)
    async with stage(directory, report, max_tokens=_SOAK_TOKENS) as on:
        load = on.load(seed=plan.seed, aborts=plan.aborts)
        async with under_load(load, plan.num_streams):
            looks = await soak(on.cluster, plan.seconds)
        report.growth, report.problems = growth(looks), leaks(looks)
        note(load, report)
    return report


async def run_rolling_restart(plan: Plan, directory: Path) -> Report:
    report = Report("rolling restart", plan.connector, plan.seed)
    async with stage(directory, report, max_tokens=plan.max_tokens) as on:
        load = on.load(seed=plan.seed)
        async with under_load(load, plan.num_streams):
            statuses = await rolling_restart(on.cluster)
        report.problems += [f"{name} has drained with exit code {code}" for name, code in statuses.items() if code]
        note(load, report)
    return report


async def disturb(plan: Plan, on: Stage, report: Report) -> None:
    """Runs load and faults as planned, then every request once more without them."""
    load = on.load(seed=plan.seed, aborts=plan.aborts)
    injector = Injector(on.cluster)
    sequence = faults(
        plan.seed,
        with_redis=plan.connector == "redis",
        most_after=plan.most_after,
        most_seconds=plan.most_fault_seconds,
    )
    async with under_load(load, plan.num_streams):
        await injector.run(sequence, seconds=plan.seconds)
    note(load, report, without_decode=injector.without_decode)
    again = await undisturbed(on.cluster.client, on.asks)
    report.problems += [f"after the chaos, {difference}" for difference in differences(again, on.expected)]
    report.faults = {kind.value: count for kind, count in injector.counts.items()}
    report.problems += injector.problems


@asynccontextmanager
async def under_load(load: Load, num_streams: int) -> AsyncIterator[None]:
    """Runs the load during the context. At its end no new request is begun, and the last ones are waited for."""
    async with asyncio.TaskGroup() as group:
        group.create_task(load.run(num_streams))
        progress = group.create_task(_say_progress(load))
        try:
            yield
        finally:
            load.stop()
            progress.cancel()


async def _say_progress(load: Load) -> None:
    while True:
        await asyncio.sleep(_PROGRESS_SECONDS)
        counts = ", ".join(f"{count} {verdict.value}" for verdict, count in load.report.verdicts.items())
        _logger.info("%d requests: %s", load.report.requests, counts)


def note(load: Load | Storm, report: Report, *, without_decode: Sequence[tuple[float, float]] = ()) -> None:
    """Puts what the clients saw into the report. Requests may be refused in the intervals of `without_decode` only."""
    found = load.report
    report.requests = found.requests
    report.refused_requests = len(found.refusals)
    if wrong := [at for at in found.refusals if not any(a <= at <= b + _REFUSAL_SECONDS for a, b in without_decode)]:
        report.problems.append(f"{len(wrong)} requests were refused while a decode node lived")
    report.aborted_by_clients = found.aborted
    report.failed_requests = found.verdicts[Verdict.FAILED]
    report.differing_streams = found.verdicts[Verdict.DIFFERENT]
    report.duplicates_or_gaps = found.verdicts[Verdict.SHIFTED]
    report.longest_stall = found.longest_gap
    report.longest_wait_for_first_chunk = found.longest_first
    report.examples = found.examples


async def look_around(cluster: ChaosCluster, report: Report) -> None:
    """Reports what is left on nodes and router when no client asks any more."""
    loads = await asyncio.gather(*(node.load_when() for node in cluster.nodes.values()))
    for node, load in zip(cluster.nodes.values(), loads, strict=True):
        report.blocks_left += load.num_blocks - load.num_free_blocks
        report.leases_left += load.num_leases
        if not is_idle(load):
            report.problems.append(f"{node.name} is not idle: {str(load).replace(chr(10), ' ')}")
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_IDLE_SECONDS):
            while await cluster.metric("kvrelay:num_requests_running"):
                await asyncio.sleep(0.1)
    report.requests_left = int(await cluster.metric("kvrelay:num_requests_running"))
    report.migrations = int(await cluster.metric("kvrelay:request_migrations_total"))
    report.recomputed_tokens = int(await cluster.metric("kvrelay:recomputed_tokens_total"))


def _errors_logged(directory: Path) -> list[str]:
    """Returns the lines of the processes' logs that report an error of our own; a lost peer is only a warning."""
    return [
        f"{path.name}: {line}"
        for path in sorted(directory.glob("*.log"))
        for line in path.read_text().splitlines()
        if any(word in line for word in _OWN_FAULTS)
    ]
