"""A watcher gets a message at least once per heartbeat, with the counters of the connector and the leases."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, cast

import pytest

from decode_node.service import DecodeService
from kv_connector.header import Mismatch
from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.core.kv.block_hash import BlockHash
from kvrelay.core.kv.source import KVSource
from kvrelay.core.node_report import NodeRole, RefusedBlock
from kvrelay.core.rpc.wire import refused_to_wire
from kvrelay.engine.request import EngineRequest
from kvrelay.node import node_service
from kvrelay.node.node_service import NodeService
from kvrelay.v1 import node_pb2
from tests.manual_clock import ManualClock
from tests.node.fake_node import make_node, serving

PATIENCE = 10.0


async def test_an_idle_node_sends_one_message_per_heartbeat() -> None:
    node = make_node()
    stats = node.connector.all_stats()["in_process"]
    stats.refused[Mismatch.DIGEST] = 2
    stats.bytes_fetched = 4096
    node.lease_counts.expired = 3
    async with serving(DecodeService, node):
        service = NodeService(node, NodeRole.DECODE, heartbeat=0.01, clock=ManualClock())
        watch = cast(AsyncGenerator[node_pb2.WatchResponse, None], service.Watch(node_pb2.WatchRequest(), cast(Any, 0)))
        async with aclosing(watch) as messages, asyncio.timeout(PATIENCE):
            first = await anext(messages)
            assert first.reset and first.HasField("stats")
            for _ in range(3):
                message = await anext(messages)
                assert message.HasField("load") and not message.reset
                assert not message.HasField("stats"), "its time has not come again"
    assert first.stats.num_leases_expired == 3
    [connector] = first.stats.connectors
    assert connector.connector == "in_process"
    assert connector.counters["bytes_fetched"] == 4096
    assert connector.refused["digest"] == 2


async def test_counts_are_sent_again_with_every_heartbeat_and_told_apart() -> None:
    clock = ManualClock()
    async with serving(DecodeService, node := make_node()):
        service = NodeService(node, NodeRole.DECODE, heartbeat=0.01, clock=clock)
        watch = cast(AsyncGenerator[node_pb2.WatchResponse, None], service.Watch(node_pb2.WatchRequest(), cast(Any, 0)))
        async with aclosing(watch) as messages, asyncio.timeout(PATIENCE):
            for number in (1, 10, 100):
                counts = node.lease_counts
                counts.released, counts.ended_early, counts.expired = 2 * number, 3 * number, 5 * number
                stats = (await anext(messages)).stats
                found = (stats.num_leases_released, stats.num_leases_ended_early, stats.num_leases_expired)
                assert found == (2 * number, 3 * number, 5 * number)
                assert not (await anext(messages)).HasField("stats"), "its time has not come again"
                clock.seconds += 0.01


async def test_watchers_hear_of_refused_blocks_and_a_distrusted_block_is_held_no_more() -> None:
    async with serving(DecodeService, node := make_node()):
        service = NodeService(node, NodeRole.DECODE)
        watch = cast(AsyncGenerator[node_pb2.WatchResponse, None], service.Watch(node_pb2.WatchRequest(), cast(Any, 0)))
        async with aclosing(watch) as messages, asyncio.timeout(PATIENCE):
            await anext(messages)
            prompt = EngineRequest("r", tuple(range(17)), SamplingParams(max_tokens=1, seed=0))
            await node.engine_thread.call(lambda engine: engine.add(prompt))
            names: list[bytes] = []
            while len(names) < 2:
                names += (await anext(messages)).stored
            refused = RefusedBlock(KVSource("p", 7, "there"), BlockHash(names[0]))
            node.event_log.append_refused(refused)
            found: list[node_pb2.RefusedBlock] = []
            while not found:
                found += (await anext(messages)).refused
            assert found == [refused_to_wire(refused)]
            for epoch, named in ((node.identity.epoch + 1, names[0]), (node.identity.epoch, names[1])):
                for name in (bytes(32), named):
                    await service.Distrust(node_pb2.DistrustRequest(epoch=epoch, name=name), cast(Any, 0))
            removed: list[bytes] = []
            while not removed:
                removed += (await anext(messages)).removed
            assert removed == [names[1]], "the other name was meant for another process"
            await node.check_idle()


@pytest.mark.parametrize("gathers", [False, True])
async def test_watchers_are_told_at_once_that_a_node_drains(gathers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while a watcher gathers further changes, as that of a busy node mostly does. What changes later is gathered
    again."""
    monkeypatch.setattr(node_service, "_WATCH_INTERVAL_SECONDS", 3600.0)
    async with serving(DecodeService, node := make_node()):
        service = NodeService(node, NodeRole.DECODE, heartbeat=3600.0)
        watch = cast(AsyncGenerator[node_pb2.WatchResponse, None], service.Watch(node_pb2.WatchRequest(), cast(Any, 0)))
        async with aclosing(watch) as messages, asyncio.timeout(PATIENCE):
            assert not (await anext(messages)).draining
            following = asyncio.ensure_future(anext(messages))
            if gathers:
                await asyncio.sleep(0)
            node.event_log.append([], [], node.event_log.load)
            await node.drain()
            assert (await following).draining
            last = asyncio.ensure_future(anext(messages))
            node.event_log.append([], [], node.event_log.load)
            assert not (await asyncio.wait({last}, timeout=0.1))[0]
            node.event_log.close()
            with pytest.raises(StopAsyncIteration):
                await last


@pytest.mark.parametrize("drains", [True, False])
async def test_a_watcher_is_told_that_a_node_drains_though_it_ends_at_once(
    drains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests would count as what has ended it. Those of a node that has crashed do."""
    monkeypatch.setattr(node_service, "_WATCH_INTERVAL_SECONDS", 3600.0)
    async with serving(DecodeService, node := make_node()):
        service = NodeService(node, NodeRole.DECODE)
        watch = cast(AsyncGenerator[node_pb2.WatchResponse, None], service.Watch(node_pb2.WatchRequest(), cast(Any, 0)))
        async with aclosing(watch) as messages, asyncio.timeout(PATIENCE):
            assert not (await anext(messages)).draining
            following = asyncio.ensure_future(anext(messages, None))
            await asyncio.sleep(0)
            if drains:
                node.draining = True
                node.event_log.touch()
            node.event_log.close()
            message = await following
            assert (message is not None and message.draining) is drains
            assert await anext(messages, None) is None


@pytest.mark.parametrize(("num_names", "sizes"), [(0, [0]), (3, [3]), (7, [3, 3, 1])])
async def test_a_long_snapshot_is_split_and_counts_only_when_its_last_part_is_there(
    monkeypatch: pytest.MonkeyPatch, num_names: int, sizes: list[int]
) -> None:
    """Only the first part has the watcher forget what it knew; only after the last one does it continue from there."""
    monkeypatch.setattr(node_service, "_NAMES_PER_MESSAGE", 3)
    names = [BlockHash(bytes([number]) * 32) for number in range(num_names)]
    async with serving(DecodeService, node := make_node()):
        node.event_log.append(names, [], node.event_log.load)
        service = NodeService(node, NodeRole.DECODE)
        watch = cast(AsyncGenerator[node_pb2.WatchResponse, None], service.Watch(node_pb2.WatchRequest(), cast(Any, 0)))
        async with aclosing(watch) as messages, asyncio.timeout(PATIENCE):
            parts = [await anext(messages) for _ in sizes]
    assert [len(part.stored) for part in parts] == sizes
    assert sorted(name for part in parts for name in part.stored) == names
    assert [part.reset for part in parts] == [True] + [False] * (len(sizes) - 1)
    assert [part.sequence for part in parts] == [0] * (len(sizes) - 1) + [min(num_names, 1)]


async def test_a_long_list_of_lost_blocks_is_split_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_service, "_NAMES_PER_MESSAGE", 3)
    names = [BlockHash(bytes([number]) * 32) for number in range(9)]
    async with serving(DecodeService, node := make_node()):
        log = node.event_log
        log.append(names[:7], [], log.load)
        log.append(names[7:], names[:7], log.load)
        service = NodeService(node, NodeRole.DECODE)
        request = node_pb2.WatchRequest(epoch=node.identity.epoch, after_sequence=1)
        watch = cast(AsyncGenerator[node_pb2.WatchResponse, None], service.Watch(request, cast(Any, 0)))
        async with aclosing(watch) as messages, asyncio.timeout(PATIENCE):
            parts = [await anext(messages) for _ in range(3)]
    assert [(len(part.removed), len(part.stored)) for part in parts] == [(3, 2), (3, 0), (1, 0)]
    assert [name for part in parts for name in part.removed] == names[:7]
    assert [(part.sequence, part.HasField("load"), part.reset) for part in parts] == [
        (0, False, False),
        (0, False, False),
        (2, True, False),
    ]
