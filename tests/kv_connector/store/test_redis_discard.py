"""A block that is discarded while it is on its way to Redis: it arrives, and is deleted afterwards."""

import asyncio
from contextlib import suppress
from dataclasses import replace

from kv_connector.base import FetchOutcome, HostConnector
from kv_connector.in_process import InProcessConnector, InProcessHub
from kv_connector.store.redis_store import RedisConnector
from kv_connector.tiered import TieredConnector
from tests.chaos.proxy import Proxy
from tests.kv_connector.backends import EPOCH, LAYOUT, Node, RedisHarness, blocks
from tests.redis_server import RedisServer

FETCHED, MISSING, REFUSED, FAILED = FetchOutcome
PATIENCE = 20.0
NUM_ROUND_TRIPS = 20  # more than it takes to connect and to delete a block


class SlowStores(Proxy):
    """A proxy that holds back SETs, and what follows on their connections, until `gate` is open. `held`: it has met
    one."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.gate = asyncio.Event()
        self.held = asyncio.Event()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                if b"\r\nSET\r\n" in data:
                    self.held.set()
                    await self.gate.wait()
                writer.write(data)
                await writer.drain()


async def test_a_block_that_is_on_its_way_is_deleted_when_it_has_arrived(redis_server: RedisServer) -> None:
    """The other one of the same SETs stays."""
    network = SlowStores(redis_server.port)
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
