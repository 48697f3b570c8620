"""An engine that hangs is noticed without traffic; one that is idle, or was stopped with its process, does not hang."""

import asyncio
import threading
from typing import Any

import grpc
import pytest

from decode_node.service import DecodeService
from kvrelay.core.rpc.connections import WHOLE_SERVER
from kvrelay.engine.engine import Engine
from kvrelay.node.server import NodeServer
from kvrelay.node.watchdog import EngineHungError, Watchdog
from kvrelay.v1 import node_pb2, node_pb2_grpc
from tests.node.fake_node import make_node
from tests.node.health import health_of

PATIENCE = 10.0


def test_only_an_engine_that_does_not_turn_hangs() -> None:
    turns = iter([5, 5, 5, 6, 6, 6, 6, 6])
    dog = Watchdog(lambda: next(turns), EngineHungError, lambda error: None, timeout=4.0)  # checks every second
    assert [dog.check() for _ in range(8)] == [True] * 7 + [False]


def test_time_is_counted_in_checks() -> None:
    """A process that was stopped for an hour has checked once."""
    dog = Watchdog(lambda: 1, EngineHungError, lambda error: None, timeout=60.0)
    assert all(dog.check() for _ in range(60))
    assert not dog.check()


async def test_a_watchdog_that_fails_counts_as_a_hang() -> None:
    """Nothing would be noticed any more."""

    def fail() -> object:
        raise ValueError("a fault of ours")

    failure: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    dog = Watchdog(fail, EngineHungError, failure.set_result, timeout=60.0)
    dog.start()
    assert isinstance(await asyncio.wait_for(failure, PATIENCE), ValueError)
    await dog.close()


async def watched_until_it_ends(channel: grpc.aio.Channel) -> None:
    stub: Any = node_pb2_grpc.NodeStub(channel)
    async for _ in stub.Watch(node_pb2.WatchRequest(), timeout=PATIENCE):
        pass


async def test_a_node_whose_engine_hangs_reports_it_and_ends_its_watchers_streams() -> None:
    gate = threading.Event()

    def hang(engine: Engine) -> None:
        assert gate.wait(PATIENCE)

    node = make_node()
    server = NodeServer(node, service := DecodeService(node))
    port = await server.start("127.0.0.1", 0)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            watching = asyncio.create_task(watched_until_it_ends(channel))
            stub: Any = node_pb2_grpc.NodeStub(channel)
            assert [await health_of(channel, name) for name in (WHOLE_SERVER, service.name)] == ["SERVING"] * 2
            node.engine_thread.post(hang)
            node.watch(0.2)
            async with asyncio.timeout(PATIENCE):
                await node.crashed.wait()
                await watching
            with pytest.raises(grpc.aio.AioRpcError, match="has crashed") as refused:
                await stub.Describe(node_pb2.DescribeRequest())
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert await health_of(channel, WHOLE_SERVER) == "NOT_SERVING"
            assert await health_of(channel, service.name) == "NOT_SERVING"
    finally:
        async with asyncio.timeout(PATIENCE / 2):
            await server.close()  # waits for the hanging step no longer
        gate.set()


async def test_an_idle_engine_does_not_hang() -> None:
    """It makes turns without traffic."""
    node = make_node()
    NodeServer(node, service := DecodeService(node))
    service.start()
    node.watch(PATIENCE)
    before = node.engine_thread.num_turns
    async with asyncio.timeout(PATIENCE):
        while node.engine_thread.num_turns < before + 2:
            await asyncio.sleep(0.05)
    assert not node.crashed.is_set()
    await node.close()


async def test_a_node_that_closes_is_watched_no_more() -> None:
    """Its engine makes no turn any more, and would seem to hang while the rest ends."""
    node = make_node()
    node.start(lambda result: None)
    node.watch(PATIENCE)
    await node.close()
    assert "watchdog" not in {task.get_name() for task in asyncio.all_tasks()}
