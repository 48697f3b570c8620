"""A store behind another tier: until when it is waited for, by what it is judged, and when it is closed."""

import asyncio

import redis

from kv_connector.base import FetchOutcome, HostConnector
from kv_connector.in_process import InProcessConnector, InProcessHub
from kv_connector.settings import RedisSettings
from kv_connector.store.redis_store import RedisConnector
from kv_connector.tiered import TieredConnector
from tests.kv_connector.backends import EPOCH, LAYOUT, Node, blocks, moved, write_and_publish
from tests.redis_server import RedisServer

FETCHED, MISSING, REFUSED, FAILED = FetchOutcome
PATIENCE = 20.0


def store(server: RedisServer, prefix: str) -> RedisConnector:
    return RedisConnector(RedisSettings(url=server.url, key_prefix=prefix, operation_timeout_seconds=PATIENCE))


async def test_storing_is_finished_when_the_store_has_the_blocks(redis_server: RedisServer) -> None:
    """Redis takes no writes for a while, and answers reads."""
    tiers: list[HostConnector] = [InProcessConnector(InProcessHub()), store(redis_server, "finished")]
    node = Node(TieredConnector(tiers), "node", 8, LAYOUT, EPOCH)
    sent = blocks(3)
    for block in sent:
        node.fill(block)
    with redis.Redis.from_url(redis_server.url) as client:
        try:
            client.client_pause(int(PATIENCE * 1000), all=False)
            await node.connector.publish(sent)
            finishing = asyncio.create_task(node.connector.finish_storing())
            assert set(await node.connector.fetch(None, moved(sent, 4), timeout=PATIENCE)) == {MISSING}
            assert not finishing.done()
        finally:
            client.client_unpause()
    async with asyncio.timeout(PATIENCE):
        await finishing
    assert set(await node.connector.fetch(None, moved(sent, 4), timeout=PATIENCE)) == {FETCHED}
    await node.connector.close()


async def test_a_fetch_is_compared_with_computing_its_tokens(redis_server: RedisServer) -> None:
    """The last block of a prompt is seldom full."""
    asked: list[int] = []
    tiers: list[HostConnector] = [InProcessConnector(InProcessHub()), store(redis_server, "tokens")]
    node = Node(TieredConnector(tiers, recompute_seconds=asked.append), "node", 16, LAYOUT, EPOCH)
    for sent in (blocks(2), blocks(3, tag="partial", tail=5)):
        await write_and_publish(node, sent)
        assert set(await node.connector.fetch(None, moved(sent, 4), timeout=PATIENCE)) == {FETCHED}
    assert asked == [2 * 16, 2 * 16 + 5]
    await node.connector.close()


class Recorded(InProcessConnector):
    """A tier that adds its name to `closed` when it is closed."""

    def __init__(self, name: str, closed: list[str]) -> None:
        super().__init__(InProcessHub())
        self.name = name
        self._closed = closed

    async def close(self) -> None:
        self._closed.append(self.name)
        await super().close()


async def test_the_tier_that_owns_the_pool_is_closed_last() -> None:
    """The others serve from its memory until they are closed."""
    closed: list[str] = []
    tiers = [Recorded(name, closed) for name in ("owner", "second", "third")]
    node = Node(TieredConnector(tiers), "node", 8, LAYOUT, EPOCH)
    await node.connector.close()
    assert closed == ["third", "second", "owner"]
