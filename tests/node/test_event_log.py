"""A watcher that replays the log knows exactly what the node holds."""

import asyncio
import random
from dataclasses import replace

from kvrelay.core.kv.block_hash import BlockHash
from kvrelay.core.kv.source import KVSource
from kvrelay.core.node_report import RefusedBlock
from kvrelay.engine.step_result import EngineLoad
from kvrelay.node.event_log import EventLog

LOAD = EngineLoad(0, 0, 0, 0, 8, 8, 0, 0, 0)


def name(i: int) -> BlockHash:
    return BlockHash(i.to_bytes(32, "big"))


def test_replay_from_any_sequence_number_gives_the_blocks_held() -> None:
    rng = random.Random(0)
    log = EventLog(LOAD, capacity=20)
    held: set[BlockHash] = set()
    snapshots: list[set[BlockHash]] = [set()]
    for _ in range(60):
        removed = rng.sample(sorted(held), k=min(len(held), rng.randrange(3)))
        stored = [name(rng.randrange(40)) for _ in range(rng.randrange(1, 3))]
        stored = [item for item in dict.fromkeys(stored) if item not in held]
        held = (held - set(removed)) | set(stored)
        log.append(stored, removed, LOAD)
        if stored or removed:
            snapshots.append(set(held))
    for sequence, known in enumerate(snapshots):
        update = log.since(sequence)
        assert update.reset == (len(snapshots) - 1 - sequence > 20)
        base = set() if update.reset else known
        assert (base - set(update.removed)) | set(update.stored) == held
        assert (base | set(update.stored)) - set(update.removed) == held, "a large update is sent in parts"
    assert log.since(None).reset
    assert set(log.since(None).stored) == held
    assert log.since(10_000).reset, "a number from another life of the node"


async def test_refused_blocks_are_replayed_like_changes_and_not_part_of_a_snapshot() -> None:
    log = EventLog(LOAD)
    log.append([name(1)], [], LOAD)
    version = await log.changed(-1)
    refused = [RefusedBlock(KVSource("p", 7, "there"), name(number)) for number in (2, 3)]
    for each in refused:
        log.append_refused(each)
    assert await asyncio.wait_for(log.changed(version), 5) > version
    assert log.since(1).refused == tuple(refused) and not log.since(1).stored
    assert log.since(2).refused == (refused[1],) and log.since(3).refused == ()
    assert log.since(None).refused == () and log.since(None).stored == (name(1),)


async def test_watchers_wake_for_changes_and_when_the_log_closes() -> None:
    log = EventLog(LOAD)
    version = await log.changed(-1)
    for number in (1, 2):
        waiting = [asyncio.ensure_future(log.changed(version)) for _ in range(2)]
        await asyncio.sleep(0)
        assert not any(watcher.done() for watcher in waiting)
        log.append([], [], replace(LOAD, num_steps=number))
        version, also = await asyncio.wait_for(asyncio.gather(*waiting), 5)
        assert version == also
        assert log.since(0).load.num_steps == number
    ending = asyncio.ensure_future(log.changed(version))
    await asyncio.sleep(0)
    log.close()
    assert await asyncio.wait_for(ending, 5) == version


async def test_watchers_wake_when_the_node_itself_has_changed() -> None:
    """Routers would hear a heartbeat later that it drains, for instance."""
    log = EventLog(LOAD)
    version = await log.changed(-1)
    waiting = asyncio.ensure_future(log.changed(version))
    await asyncio.sleep(0)
    log.touch()
    assert await asyncio.wait_for(waiting, 5) > version
