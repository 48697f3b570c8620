"""The faults of a cluster: a sequence that a seed decides, and its execution.

Rules: while one decode node is hurt the other one is left alone and live, unless all are killed at once. Everything
that is hurt is healed, and is not hurt again before the router takes it for live.
"""

import asyncio
import logging
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

import redis

from tests.chaos.nodes import NODE_NAMES, ChaosCluster, ChaosNode

_Item = TypeVar("_Item")

_logger = logging.getLogger(__name__)
_MOST_PAUSE_SECONDS = 10.0
_HEAL_SECONDS = 90.0
_MOST_WAITING = 4  # faults whose target is not whole yet


class Kind(Enum):
    KILL = "kill -9 and start again"
    PAUSE = "SIGSTOP, then SIGCONT"
    HASTY_RESTART = "stop in haste and start again"
    DRAIN = "SIGTERM, drain and start again"
    CUT = "cut its connections"
    BLACK_HOLE = "black hole"
    NO_PREFILL = "kill -9 of all prefill nodes"
    NO_DECODE = "kill -9 of all decode nodes"
    REDIS_PAUSE = "SIGSTOP of redis-server, then SIGCONT"
    REDIS_KILL = "kill -9 of redis-server and start again"
    REDIS_FLUSH = "FLUSHALL"


OF_REDIS = (Kind.REDIS_PAUSE, Kind.REDIS_KILL, Kind.REDIS_FLUSH)
_OF_NODES = tuple(kind for kind in Kind if kind not in OF_REDIS)
_TARGETS = {Kind.NO_PREFILL: "prefill", Kind.NO_DECODE: "decode"} | dict.fromkeys(OF_REDIS, "redis")


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, `after` seconds after the one before it, that lasts `seconds` if it has a duration. `target` is the
    name of a node, a role for all nodes of that role, or "redis"."""

    kind: Kind
    target: str
    after: float
    seconds: float


def faults(seed: int, *, with_redis: bool, most_after: float, most_seconds: float) -> Iterator[Fault]:
    """Yields faults without end. All kinds come before one comes again, and all nodes before one is hurt again."""
    chance = random.Random(seed)
    kinds = _shuffled_rounds(chance, [*_OF_NODES, *(OF_REDIS if with_redis else ())])
    nodes = _shuffled_rounds(chance, NODE_NAMES)
    for kind in kinds:
        target = _TARGETS.get(kind) or next(nodes)
        yield Fault(kind, target, chance.uniform(0.2, most_after), chance.uniform(1.0, most_seconds))


def _shuffled_rounds(chance: random.Random, items: Sequence[_Item]) -> Iterator[_Item]:
    """Yields all items in random order, again and again."""
    while True:
        yield from chance.sample(items, len(items))


@dataclass(slots=True)
class Injector:
    """A task that inflicts faults on a cluster and heals them. `problems` tells what did not heal or ended in error,
    `without_decode` from when to when no decode node lived, or the router did not know of all of them."""

    cluster: ChaosCluster
    counts: Counter[Kind] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    without_decode: list[tuple[float, float]] = field(default_factory=list)
    _busy: set[str] = field(default_factory=set)
    _freed: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, sequence: Iterator[Fault], *, seconds: float) -> None:
        """Inflicts faults, none of which begins after so many seconds, and returns when the last one is healed."""
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            waiting = asyncio.Semaphore(_MOST_WAITING)
            for fault in sequence:
                await asyncio.sleep(fault.after)
                await waiting.acquire()
                if time.monotonic() - began > seconds:
                    return
                group.create_task(self._inflict_when_allowed(fault, waiting, began, began + seconds))

    async def _inflict_when_allowed(self, fault: Fault, waiting: asyncio.Semaphore, began: float, end: float) -> None:
        """Waits until the rules allow the fault. Later ones may begin before it."""
        names = self._names(fault)
        needed = set(names)
        if fault.target.startswith("decode"):
            needed |= {node.name for node in self.cluster.of_role("decode")}
        while needed & self._busy:
            self._freed.clear()
            await self._freed.wait()
        waiting.release()
        now = time.monotonic()
        if now > end:
            return
        self._busy.update(names)
        self.counts[fault.kind] += 1
        _logger.info("%5.1f s: %s: %s (%.1f s)", now - began, fault.target, fault.kind.value, fault.seconds)
        await self._inflict(fault, names)
        if fault.kind is Kind.NO_DECODE:
            self.without_decode.append((now, time.monotonic()))
        _logger.info("%5.1f s: %s is whole again", time.monotonic() - began, fault.target)

    def _names(self, fault: Fault) -> list[str]:
        return [node.name for node in self.cluster.of_role(fault.target)] or [fault.target]

    async def _inflict(self, fault: Fault, names: list[str]) -> None:
        try:
            async with asyncio.timeout(_HEAL_SECONDS):
                if fault.target == "redis":
                    await self._hurt_redis(fault)
                else:
                    await asyncio.gather(*(self._hurt(fault, self.cluster.nodes[name]) for name in names))
                    await self.cluster.wait_live(*names)
        except TimeoutError:
            self.problems.append(f"{fault.kind.value} of {fault.target}: not healed in time")
        finally:
            self._busy.difference_update(names)
            self._freed.set()

    async def _hurt(self, fault: Fault, node: ChaosNode) -> None:
        how: dict[Kind, Callable[[Fault, ChaosNode], Awaitable[None]]] = {
            Kind.KILL: _kill,
            Kind.NO_PREFILL: _kill,
            Kind.NO_DECODE: _kill,
            Kind.PAUSE: _pause,
            Kind.HASTY_RESTART: self._restart_in_haste,
            Kind.DRAIN: self._drain,
            Kind.CUT: _cut,
            Kind.BLACK_HOLE: _black_hole,
        }
        await how[fault.kind](fault, node)

    async def _drain(self, fault: Fault, node: ChaosNode) -> None:
        status = await node.terminate()
        if status != 0:
            self.problems.append(f"{node.name} has drained with exit code {status}")
        await node.start()

    async def _restart_in_haste(self, fault: Fault, node: ChaosNode) -> None:
        node.send(signal.SIGTERM)
        await asyncio.to_thread(node.running.wait_log, "draining for at most")
        node.hurry()
        status = await node.wait()
        if status != 0:
            self.problems.append(f"{node.name} has ended in haste with exit code {status}")
        await node.start()

    async def _hurt_redis(self, fault: Fault) -> None:
        server = self.cluster.setup.redis
        assert server is not None
        match fault.kind:
            case Kind.REDIS_PAUSE:
                server.send_signal(signal.SIGSTOP)
                await asyncio.sleep(fault.seconds)
                server.send_signal(signal.SIGCONT)
            case Kind.REDIS_KILL:
                server.stop()
                await asyncio.sleep(fault.seconds)
                await asyncio.to_thread(server.restart)
            case _:
                with redis.Redis.from_url(server.url) as store:
                    await asyncio.to_thread(store.flushall)


async def _kill(fault: Fault, node: ChaosNode) -> None:
    await node.kill()
    await node.start()


async def _pause(fault: Fault, node: ChaosNode) -> None:
    node.send(signal.SIGSTOP)
    await asyncio.sleep(min(fault.seconds, _MOST_PAUSE_SECONDS))
    node.send(signal.SIGCONT)


async def _cut(fault: Fault, node: ChaosNode) -> None:
    node.proxy.cut()
    await node.proxy.wait_connected()  # until then the router may not have noticed, and still take the node for live


async def _black_hole(fault: Fault, node: ChaosNode) -> None:
    node.proxy.silence()
    await asyncio.sleep(fault.seconds)
    node.proxy.speak()
