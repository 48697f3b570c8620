"""Blocks that are deleted in Redis: while they are on their way to it, and while it does not answer."""

import asyncio
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from kv_connector.base import FetchOutcome, HostConnector
from kv_connector.in_process import InProcessConnector, InProcessHub
from kv_connector.store.redis_store import RedisConnector
from kv_connector.tiered import TieredConnector
from tests.chaos.proxy import Proxy
from tests.kv_connector.backends import EPOCH, LAYOUT, Node, RedisHarness, blocks, write_and_publish
from tests.redis_server import RedisServer

FETCHED, MISSING, REFUSED, FAILED = FetchOutcome
PATIENCE = 20.0
NUM_ROUND_TRIPS = 20  # more than it takes to connect and to delete a block


class Holding(Proxy):
    """A proxy that holds back one kind of command, and what follows on the same connection, until `gate` is open.
    `held`: it has met one."""

    def __init__(self, port: int, command: bytes) -> None:
        super().__init__(port)
        self._command = command
        self.gate = asyncio.Event()
        self.held = asyncio.Event()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                if b"\r\n%b\r\n" % self._command in data:
                    self.held.set()
                    await self.gate.wait()
                writer.write(data)
                await writer.drain()


async def test_a_block_that_is_on_its_way_is_deleted_when_it_has_arrived(redis_server: RedisServer) -> None:
    """The other one of the same SETs stays."""
    network = Holding(redis_server.port, b"SET")
    await network.start()
    settings = RedisHarness(f"redis://{network.address}/0", "discarded").settings
    store = RedisConnector(replace(settings, operation_timeout_seconds=PATIENCE))
    tiers: list[HostConnector] = [InProcessConnector(InProcessHub()), store]
    node = Node(TieredConnector(tiers), "node", 16, LAYOUT, EPOCH)
    sent = blocks(2)
    for block in sent:
        node.fill(block)
    async with asyncio.timeout(PATIENCE):
        await node.connector.publish(sent)
        await network.held.wait()
        node.connector.retract([1])
        discarding = asyncio.create_task(node.connector.discard([sent[1].block_hash]))
        for _ in range(NUM_ROUND_TRIPS):
            assert await store.fetch(None, sent, timeout=PATIENCE) == (MISSING, MISSING)
        network.gate.set()
        await discarding
        await node.connector.finish_storing()
        assert await store.fetch(None, sent, timeout=PATIENCE) == (FETCHED, MISSING)
    await node.connector.close()
    await network.close()


async def test_deleting_a_bad_value_does_not_outlast_the_fetch(redis_server: RedisServer) -> None:
    """A fetch ends at its deadline even if Redis stops answering after it has sent the value."""
    network = Holding(redis_server.port, b"UNLINK")
    await network.start()
    harness = RedisHarness(redis_server.url, "silent")
    settings = replace(harness.settings, url=f"redis://{network.address}/0", operation_timeout_seconds=60.0)
    connector = RedisConnector(settings)
    Node(connector, "node", 16, LAYOUT, EPOCH)
    (block,) = blocks(1)
    with redis.Redis.from_url(redis_server.url) as client:
        client.set(harness.key(block), b"garbage")
    async with asyncio.timeout(PATIENCE):
        assert await connector.fetch(None, [block], timeout=5.0) == (REFUSED,)
    assert network.held.is_set()
    await connector.close()
    await network.close()


@pytest.mark.parametrize("refusal", ["REPLICAOF 127.0.0.1 1", "ACL SETUSER default -unlink"])
@pytest.mark.parametrize("is_damaged", [True, False])
async def test_a_server_that_refuses_to_delete_is_read_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, refusal: str, is_damaged: bool
) -> None:
    """It has answered. A log of every block that stays there would be a long one."""
    server = RedisServer(tmp_path)
    try:
        harness = RedisHarness(server.url, "kept")
        connector = RedisConnector(replace(harness.settings, operation_timeout_seconds=PATIENCE))
        node = Node(connector, "node", 16, LAYOUT, EPOCH)
        healthy, *bad = blocks(5)
        await write_and_publish(node, [healthy, *bad])
        if is_damaged:
            for block in bad:
                harness.damage(node, block)
        with redis.Redis.from_url(server.url) as client:
            client.execute_command(*refusal.split())
        for block in bad:
            if is_damaged:
                assert await connector.fetch(None, [block], timeout=PATIENCE) == (REFUSED,)
            else:
                await connector.discard([block.block_hash])
        assert await connector.fetch(None, [healthy], timeout=PATIENCE) == (FETCHED,)
        assert caplog.text.count("stay in Redis") == 1
        await connector.close()
    finally:
        server.stop()
