"""One run: a cluster, clients and disasters, and the checks at its end.

Invariant: the same scenario, faults and `random` give the same run, event by event.
"""

import asyncio
import gc
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from random import Random

from tests.simulation.client import LONG_WAIT, Behaviour, Client, Plan
from tests.simulation.cluster import Cluster, ClusterConfig, process_task
from tests.simulation.faults import Faults
from tests.simulation.invariants import expired_leases, left_tasks, wait_clean
from tests.simulation.ledger import kv_by_name
from tests.simulation.store import StoreState
from tests.simulation.virtual_loop import StuckError, VirtualLoop, run_virtual

FAULT_SECONDS = 20.0  # after this nothing goes wrong any more
_LONGEST_RUN_SECONDS = 900.0
_ROUNDING_SECONDS = 1e-6


class Disaster(Enum):
    """What happens to a node, to a router or to the store."""

    KILL = "kill"  # and start it again at the same address
    PAUSE = "pause"
    DRAIN = "drain"  # as on SIGTERM; then start it again
    PARTITION = "partition"
    CUT = "cut"  # its connections are reset
    LINK = "link"  # it and another node do not read each other's KV
    PAUSE_ROUTER = "pause_router"
    KILL_ROUTER = "kill_router"  # its clients with it
    STORE_DOWN = "store_down"
    STORE_HANGS = "store_hangs"
    STORE_FULL = "store_full"
    STORE_EVICTS = "store_evicts"


STORE_DISASTERS = {
    Disaster.STORE_DOWN: StoreState.DOWN,
    Disaster.STORE_HANGS: StoreState.HANGS,
    Disaster.STORE_FULL: StoreState.FULL,
    Disaster.STORE_EVICTS: StoreState.UP,
}


@dataclass(frozen=True, slots=True)
class Strike:
    """A disaster at a time. `at` counts from when the routers know every node; `address` is that of a node, or a
    router's name, `other` that of the node at the other end of a link; `seconds` is how long the disaster lasts or the
    node is down. Times are in seconds."""

    at: float
    disaster: Disaster
    address: str = ""
    other: str = ""
    seconds: float = 1.0
    drain_seconds: float = 3.0


@dataclass(frozen=True, slots=True)
class Scenario:
    config: ClusterConfig
    plans: tuple[Plan, ...]
    strikes: tuple[Strike, ...] = ()


@dataclass(slots=True)
class Outcome:
    """What a run has shown. `failures` are errors of the code under test; a good run has none. `counts` show that
    something has happened at all."""

    failures: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    events: list[str] = field(default_factory=list)


def run_scenario(scenario: Scenario, faults: Faults, random: Random, *, traced: bool = False) -> Outcome:
    """Runs a scenario. `random` draws what the scenario leaves open: times, disasters, behaviours."""
    outcome = Outcome()

    async def main(loop: VirtualLoop) -> None:
        events: list[str] = []

        def trace(event: str) -> None:
            events.append(f"{loop.time():10.6f} {event}")

        cluster = Cluster(loop, scenario.config, random, faults, trace if traced else _ignore)
        handler = _LogTrace(trace)
        logger = logging.getLogger()
        if traced:
            logger.addHandler(handler)
        try:
            async with asyncio.timeout(_LONGEST_RUN_SECONDS):
                await _Run(scenario, cluster, random, outcome).run()
        finally:
            logger.removeHandler(handler)
            outcome.failures += cluster.failures + loop.errors
            outcome.events += events  # without those of the tasks that are ended afterwards, in any order

    gc.collect()
    try:
        run_virtual(main)
    except (StuckError, TimeoutError) as error:
        outcome.failures.append(f"the run does not end: {error!r}")
    return outcome


class _Run:
    """The course of one run."""

    def __init__(self, scenario: Scenario, cluster: Cluster, random: Random, outcome: Outcome) -> None:
        self._scenario = scenario
        self._cluster = cluster
        self._random = random
        self._outcome = outcome
        self._clients: list[Client] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._num_disasters = 0

    async def run(self) -> None:
        cluster = self._cluster
        await cluster.start()
        self._start_clients()
        disasters = [asyncio.create_task(self._strike(strike)) for strike in self._scenario.strikes]
        leaving = [asyncio.create_task(self._disappear(*pair)) for pair in zip(self._clients, self._tasks, strict=True)]
        await asyncio.gather(*disasters, *leaving)
        await self._until_ended()
        await wait_clean(cluster, kv_by_name(plan.request for plan in self._scenario.plans))
        if self._is_calm:
            cluster.failures.extend(expired_leases(cluster))
        await cluster.close()
        cluster.failures.extend(left_tasks(cluster))
        self._count()

    def _start_clients(self) -> None:
        cluster = self._cluster
        for plan in self._scenario.plans:
            router = cluster.routers[cluster.config.router_names[plan.router]]
            client = Client(
                plan,
                self._excuses(),
                self._lateness(),
                cluster.failures.append,
                cluster.trace,
                Random(self._random.getrandbits(64)),
            )
            self._clients.append(client)
            self._tasks.append(process_task(router.process, client.run(router.relay)))

    def _excuses(self) -> tuple[str, ...]:
        """Returns what a request may fail with that has begun. The loss of a node alone is no reason, since nodes come
        back; nor are the losses of many, unless there was too little time to learn which of them have ended."""
        return ("no decode node came", "given up after") if self._cluster.config.node_wait < LONG_WAIT else ()

    def _lateness(self) -> float:
        """Returns for how many seconds a router may be stopped in all."""
        pauses = (strike.seconds for strike in self._scenario.strikes if strike.disaster is Disaster.PAUSE_ROUTER)
        return _ROUNDING_SECONDS + sum(pauses)

    @property
    def _is_calm(self) -> bool:
        """Tells whether nothing has gone wrong."""
        return self._cluster.faults.num_injected + self._num_disasters == 0

    async def _until_ended(self) -> None:
        """Waits for every client of a live router. Faults go on for as long as they may."""
        tasks = [task for task in self._tasks if task not in self._lost_tasks()]
        pause = asyncio.create_task(asyncio.sleep(max(0.0, FAULT_SECONDS - self._cluster.loop.time())))
        await asyncio.wait({pause, asyncio.ensure_future(_all(tasks))}, return_when=asyncio.FIRST_COMPLETED)
        pause.cancel()
        self._cluster.calm_down()
        await _all(tasks)
        for client, task in zip(self._clients, self._tasks, strict=True):
            if task in tasks:
                client.check(calm=self._is_calm)
                if not task.cancelled() and (error := task.exception()) is not None:
                    self._cluster.failures.append(f"{client.name}: {error!r}")

    def _lost_tasks(self) -> "set[asyncio.Task[object]]":
        return {task for process in self._cluster.dead for task in process.tasks}

    async def _disappear(self, client: Client, task: "asyncio.Task[None]") -> None:
        if client.plan.behaviour is Behaviour.DISAPPEARS:
            await asyncio.sleep(client.plan.arrives_at + client.plan.disappears_after)
            name = self._cluster.config.router_names[client.plan.router]
            task.get_loop().call_soon(task.cancel, context=self._cluster.routers[name].process.context)

    # -- disasters -----------------------------------------------------------------------------------------------------

    async def _strike(self, strike: Strike) -> None:
        """Strikes a node, unless it has not come back from an earlier strike, a router or the store."""
        cluster, address = self._cluster, strike.address
        await asyncio.sleep(strike.at)
        if strike.disaster not in STORE_DISASTERS and address not in (*cluster.nodes, *cluster.routers):
            return
        self._num_disasters += 1
        self._outcome.counts[strike.disaster.value] += 1
        match strike.disaster:
            case Disaster.KILL:
                await cluster.kill(address)
                await self._restart(strike)
            case Disaster.DRAIN:
                await cluster.stop_node(address, drain_seconds=strike.drain_seconds)
                await self._restart(strike)
            case Disaster.PAUSE:
                cluster.pause(cluster.nodes[address].process, strike.seconds)
            case Disaster.PARTITION:
                cluster.trace(f"{address} is cut off for {strike.seconds} s")
                cluster.network.partition(address, strike.seconds)
            case Disaster.CUT:
                cluster.network.cut(address)
            case Disaster.LINK:
                cluster.break_link((address, strike.other), strike.seconds)
            case Disaster.PAUSE_ROUTER:
                cluster.pause(cluster.routers[address].process, strike.seconds)
            case Disaster.KILL_ROUTER:
                cluster.kill_router(address)
            case disaster:
                await self._strike_store(STORE_DISASTERS[disaster], strike.seconds)

    async def _strike_store(self, state: StoreState, seconds: float) -> None:
        store = self._cluster.store
        if state is StoreState.UP:
            self._cluster.trace("the store evicts")
            store.evict()
            return
        self._cluster.trace(f"the store is {state.value} for {seconds} s")
        store.state = state
        await asyncio.sleep(seconds)
        store.state = StoreState.UP

    async def _restart(self, strike: Strike) -> None:
        await asyncio.sleep(strike.seconds)
        self._cluster.start_node(strike.address)

    def _count(self) -> None:
        counts, cluster = self._outcome.counts, self._cluster
        counts["runs"] += 1
        counts["faults"] += cluster.faults.num_injected
        counts["disasters"] += self._num_disasters
        counts["run_ahead"] += self._scenario.config.node.run_ahead
        counts["damaged"] += cluster.copy.num_damaged
        counts["damaged_by_store"] += cluster.store.num_damaged
        for client in self._clients:
            counts["requests"] += 1
            counts[client.ending or "lost"] += 1
            counts["tokens"] += sum(map(len, client.tokens.values()))
            counts["migrations"] += client.num_migrations


class _LogTrace(logging.Handler):
    """A handler that adds what the code under test logs to the events."""

    def __init__(self, trace: Callable[[str], None]) -> None:
        super().__init__()
        self._trace = trace

    def emit(self, record: logging.LogRecord) -> None:
        self._trace(f"{record.levelname.lower()} {record.name}: {record.getMessage()}")


async def _all(tasks: "Sequence[asyncio.Task[None]]") -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


def _ignore(event: str) -> None:
    """Takes the events of a run without a trace."""
