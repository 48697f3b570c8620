"""What must hold when every request has ended and nothing goes wrong any more: nothing is left of any request."""

import asyncio
from collections.abc import Callable

from kvrelay.core.errors import UnavailableError
from prefill_node.service import PrefillService
from tests.simulation.cluster import Cluster, RunningNode, process_task
from tests.simulation.virtual_loop import describe_task

_SETTLE_SECONDS = 60.0  # leases that nobody releases expire, connections that hang break, routers find nodes again
_LOOK_SECONDS = 1.0


async def wait_clean(cluster: Cluster) -> None:
    """Waits until nothing is left; reports what is left if that takes too long."""
    loop = asyncio.get_running_loop()
    end = loop.time() + cluster.config.lease_ttl + _SETTLE_SECONDS
    while left := await _left(cluster):
        if loop.time() >= end:
            cluster.failures.extend(left)
            return
        await asyncio.sleep(_LOOK_SECONDS)


async def _left(cluster: Cluster) -> list[str]:
    left = [finding for running in cluster.nodes.values() for finding in await _left_at_node(running)]
    return [*left, *_left_at_router(cluster)]


async def _left_at_node(running: RunningNode) -> list[str]:
    left: list[str] = []
    add = _adder(left, running.address)
    try:
        await process_task(running.process, running.node.check_idle())
    except (AssertionError, UnavailableError) as error:
        add(str(error), True)
    add("requests in its service", running.service._active)
    add("activity", len(running.node.activity))
    add("transfers", running.connector.num_under_way)
    add("a crash", running.node.crashed.is_set())
    if isinstance(running.service, PrefillService):
        add("leases", len(running.service._leases))
    else:
        add("requests on its streams", [stream for stream in running.service._streams if stream.request_ids])
    return left


def _left_at_router(cluster: Cluster) -> list[str]:
    left: list[str] = []
    add = _adder(left, "the router")
    relay, registry = cluster.router.relay, cluster.router.registry
    add("requests", relay._running)
    for address, prefill in relay._prefill_clients.items():
        add(f"held leases at {address}", prefill._held)
        add(f"tasks for {address}", [task.get_name() for task in prefill._tasks])
    for address, decode in relay._decode_clients.items():
        if decode._stream is not None:
            add(f"sessions at {address}", decode._stream._sinks)
    for handle in registry.nodes:
        add(f"queued tokens at {handle.address}", handle.num_queued_tokens)
        add(f"sequences at {handle.address}", handle.num_sequences)
        add(f"{handle.address} as {handle.state.value}", handle.state.value != "live")
    index = registry.index
    index.check_integrity()
    for running in cluster.nodes.values():
        held = set(running.node.event_log.since(None).stored)
        bit = index._bits.get(running.name, 0)
        known = {name for names in (index._holders, index._unswept) for name, mask in names.items() if mask & bit}
        add(f"{len(known ^ held)} names of {running.name} wrong in the index", known != held)
    return left


def left_tasks(cluster: Cluster) -> list[str]:
    """Returns the tasks of living processes that are left after everything was closed."""
    dead = {task for process in cluster.dead for task in process.tasks}
    current = asyncio.current_task()
    return [
        f"a task is left: {describe_task(task)}"
        for task in asyncio.all_tasks()
        if task is not current and task not in dead
    ]


def _adder(left: list[str], where: str) -> Callable[[str, object], None]:
    def add(what: str, found: object) -> None:
        if found:
            left.append(f"{where} has {what} left" + ("" if found is True else f": {found}"))

    return add
