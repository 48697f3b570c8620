"""What must hold when every request has ended and nothing goes wrong any more: nothing is left of any request, and what
nodes keep for later requests is right."""

import asyncio
from collections.abc import Callable, Mapping

from kv_connector.header import HEADER_BYTES
from kvrelay.core.errors import UnavailableError
from kvrelay.core.kv.block_hash import BlockHash
from kvrelay.core.node_report import NodeLoad
from prefill_node.service import PrefillService
from router.nodes.links import Links
from tests.simulation.cluster import Cluster, Router, process_task
from tests.simulation.running_node import LAYOUT, RunningNode
from tests.simulation.virtual_loop import describe_task

_SETTLE_SECONDS = 60.0  # leases whose release was lost expire, connections that hang break, routers find nodes again
_LOOK_SECONDS = 1.0


async def wait_clean(cluster: Cluster, kv: Mapping[BlockHash, bytes]) -> None:
    """Waits until nothing is left; reports what is left if that takes too long. `kv`: what the names of blocks stand
    for."""
    loop = asyncio.get_running_loop()
    end = loop.time() + max(cluster.config.lease_ttls) + _SETTLE_SECONDS
    while left := await _left(cluster):
        if loop.time() >= end:
            cluster.failures.extend(left)
            return
        await asyncio.sleep(_LOOK_SECONDS)
    for running in cluster.nodes.values():
        cluster.failures.extend(_wrong_blocks(running, kv))
    cluster.failures.extend(_wrong_values(cluster.store.values, kv))


async def _left(cluster: Cluster) -> list[str]:
    left = [finding for running in cluster.nodes.values() for finding in await _left_at_node(running)]
    for name, router in cluster.routers.items():
        left += _left_at_router(name, router, cluster.nodes)
    return left


async def _left_at_node(running: RunningNode) -> list[str]:
    left: list[str] = []
    add = _adder(left, running.address)
    try:
        await process_task(running.process, running.node.check_idle())
    except (AssertionError, UnavailableError) as error:
        add(str(error), True)
    add("requests in its service", running.service._active)
    add("activity", len(running.node.activity))
    add("transfers", running.transport.num_under_way)
    add("a crash", running.node.crashed.is_set())
    if isinstance(running.service, PrefillService):
        add("leases", len(running.service._leases))
    add("requests on its streams", [stream for stream in running.service._streams if stream.request_ids])
    return left


def _left_at_router(name: str, router: Router, nodes: Mapping[str, RunningNode]) -> list[str]:
    left: list[str] = []
    add = _adder(left, name)
    relay, placer, registry = router.relay, router.relay._placer, router.registry
    add("requests", relay._running)
    for address, prefill in placer._prefill_clients.items():
        add(f"held leases at {address}", prefill._held)
    for address, client in (placer._prefill_clients | placer._decode_clients).items():
        if client._stream is not None:
            add(f"sessions at {address}", client._stream._sinks)
    for handle in registry.nodes:
        add(f"queued tokens at {handle.address}", handle.num_queued_tokens)
        add(f"prompts coming to {handle.address}", len(handle.coming))
        add(f"sequences at {handle.address}", handle.num_sequences)
        add(f"trials of links to {handle.address}", _trials(handle.links))
        add(f"{handle.address} as {handle.state.value}", handle.state.value != "live")
        add(f"{handle.address} as busy: {handle.load}", not _is_idle(handle.load))
    index = registry.index
    index.check_integrity()
    forgets = index._capacity < sum(running.engine.pool.num_blocks for running in nodes.values())
    for running in nodes.values():
        held = set(running.node.event_log.since(None).stored)
        bit = index._bits.get(running.name, 0)
        known = {name for names in (index._holders, index._unswept) for name, mask in names.items() if mask & bit}
        wrong = known - held if forgets else known ^ held
        add(f"{len(wrong)} names of {running.name} wrong in the index", wrong)
    return left


def _trials(links: Links) -> list[str]:
    return [source.node_id for source, breaker in links._breakers._breakers.items() if breaker._trial is not None]


def _is_idle(load: NodeLoad) -> bool:
    requests = load.num_requests_running + load.num_requests_decoding + load.num_requests_waiting
    return requests + load.num_queued_tokens + load.num_leases == 0 and load.num_free_blocks == load.num_blocks


def _wrong_blocks(running: RunningNode, kv: Mapping[BlockHash, bytes]) -> list[str]:
    """Returns what is wrong with the cached blocks of an idle node, and with what its connector offers of them."""
    pool = running.engine.pool
    names = {block_id: name for block_id in range(pool.num_blocks) if (name := pool.hash_of(block_id)) is not None}
    held = set(running.node.event_log.since(None).stored)
    wrong = [] if held == set(names.values()) else [f"{running.address} tells of other blocks than it holds"]
    for block_id, name in names.items():
        content = running.memory[block_id * LAYOUT.block_bytes : (block_id + 1) * LAYOUT.block_bytes]
        if not _is_right(content, kv.get(name)):
            wrong.append(f"block {block_id} of {running.address} is not what its name says")
    for connector in running.transport.memory:
        shared = connector._require()
        if any(names.get(block_id) != header.block_hash for block_id, header in shared.headers.items()):
            wrong.append(f"{running.address} offers blocks over {connector.name} that have lost their content")
    return wrong


def _wrong_values(values: Mapping[str, bytes], kv: Mapping[BlockHash, bytes]) -> list[str]:
    return [
        f"the store's {key} is not what its name says"
        for key, value in values.items()
        if not _is_right(value[HEADER_BYTES:], kv.get(BlockHash(bytes.fromhex(key.rpartition(":")[2]))))
    ]


def _is_right(content: bytes | memoryview, expected: bytes | None) -> bool:
    return expected is not None and bytes(content[: len(expected)]) == expected


def expired_leases(cluster: Cluster) -> list[str]:
    """Returns at which nodes leases have expired. None does while nothing goes wrong: all are renewed and released."""
    expired = {running.address: running.node.lease_counts.expired for running in cluster.nodes.values()}
    return [f"{number} leases have expired at {address}" for address, number in expired.items() if number]


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
