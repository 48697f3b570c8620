"""A Redis that becomes a replica while the name by which it is known becomes that of another one."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from kv_connector.base import FetchOutcome
from kv_connector.header import HEADER_BYTES
from kv_connector.settings import RedisSettings
from kv_connector.store.redis_store import RedisConnector
from kvrelay.core.errors import KVError
from tests.chaos.proxy import Proxy
from tests.kv_connector.backends import EPOCH, LAYOUT, Node, blocks, write_and_publish
from tests.manual_clock import ManualClock
from tests.redis_server import RedisServer


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[RedisServer, RedisServer]]:
    first, second = RedisServer(tmp_path), RedisServer(tmp_path)
    yield first, second
    first.stop()
    second.stop()


async def test_after_a_failover_blocks_are_stored_at_the_new_primary(
    servers: tuple[RedisServer, RedisServer],
) -> None:
    """The old one keeps its connections, and answers each write with a refusal."""
    first, second = servers
    name, clock = Proxy(first.port), ManualClock()
    await name.start()
    settings = RedisSettings(url=f"redis://{name.address}/0", key_prefix="failover", operation_timeout_seconds=10.0)
    node = Node(RedisConnector(settings, clock=clock), "node", 64, LAYOUT, EPOCH)
    await write_and_publish(node, blocks(3))
    with redis.Redis.from_url(first.url) as client:
        client.execute_command("REPLICAOF", "127.0.0.1", "1")
    name.redirect(second.port)
    more = blocks(3, tag="more")
    with pytest.raises(KVError, match="none of 3"):
        await write_and_publish(node, more)
    clock.seconds += 1.0
    await write_and_publish(node, more)
    assert set(await node.connector.fetch(None, more, timeout=10)) == {FetchOutcome.FETCHED}
    with redis.Redis.from_url(second.url) as client:
        assert client.dbsize() == 3
    await node.connector.close()
    await name.close()


@pytest.mark.parametrize("is_damaged", [True, False])
async def test_after_a_failover_blocks_are_deleted_at_the_new_primary(
    servers: tuple[RedisServer, RedisServer], is_damaged: bool
) -> None:
    """Damage is found, and blocks are discarded, over connections that still lead to the old one."""
    first, second = servers
    name = Proxy(first.port)
    await name.start()
    settings = RedisSettings(url=f"redis://{name.address}/0", key_prefix="failover", operation_timeout_seconds=10.0)
    node = Node(RedisConnector(settings), "node", 64, LAYOUT, EPOCH)
    good, bad = blocks(2)
    await write_and_publish(node, [good, bad])
    keys = [f"failover:{block.block_hash.hex()}" for block in (good, bad)]
    with redis.Redis.from_url(first.url) as old, redis.Redis.from_url(second.url) as new:
        if is_damaged:
            old.setrange(keys[1], HEADER_BYTES, b"damaged")
        for key in keys:
            new.set(key, old.get(key))
        old.execute_command("REPLICAOF", "127.0.0.1", "1")
        name.redirect(second.port)
        if is_damaged:
            assert await node.connector.fetch(None, [bad], timeout=10) == (FetchOutcome.REFUSED,)
        else:
            await node.connector.discard([bad.block_hash])
        assert new.keys() == [keys[0].encode()]
    await node.connector.close()
    await name.close()
