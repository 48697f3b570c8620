"""What only Redis has: a TTL, values that others wrote, and a server that can go away."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from kv_connector.base import FetchOutcome, HostConnector
from kv_connector.header import BlockHeader
from kv_connector.in_process import InProcessConnector, InProcessHub
from kv_connector.self_test import check_connector
from kv_connector.settings import RedisSettings
from kv_connector.store.redis_store import RedisConnector
from kv_connector.tiered import TieredConnector
from kvrelay.core.errors import ConfigurationError, KVError
from kvrelay.core.kv.named_block import NamedBlock
from kvrelay.core.kv.source import KVSource
from tests.kv_connector.backends import LAYOUT, Node, RedisHarness, blocks, write_and_publish
from tests.redis_server import RedisServer

NOWHERE = KVSource("any", 0, "")


def node(settings: RedisSettings) -> Node:
    return Node(RedisConnector(settings), "node", 16, LAYOUT, 1)


async def test_values_expire_and_publishing_again_renews(redis_server: RedisServer) -> None:
    harness = RedisHarness(redis_server.url, "ttl")
    owner = node(harness.settings)
    (block,) = blocks(1)
    await write_and_publish(owner, [block])
    with redis.Redis.from_url(redis_server.url) as client:
        assert 30 < int(client.ttl(harness.key(block))) <= 60
        client.expire(harness.key(block), 30)
        await owner.connector.publish([block])
        assert 30 < int(client.ttl(harness.key(block))) <= 60
    assert owner.first_stats.blocks_published == 1  # the second time only the TTL
    await owner.connector.close()


@pytest.mark.parametrize("value", [b"garbage", bytes(96), bytes(96 + LAYOUT.block_bytes)])
async def test_a_value_that_is_no_block_is_refused(redis_server: RedisServer, value: bytes) -> None:
    harness = RedisHarness(redis_server.url, "garbage")
    peer = node(harness.settings)
    (block,) = blocks(1)
    with redis.Redis.from_url(redis_server.url) as client:
        client.set(harness.key(block), value)
    assert await peer.connector.fetch(NOWHERE, [block], timeout=5) == (FetchOutcome.REFUSED,)
    await peer.connector.close()


async def test_a_long_fetch_that_misses_its_first_blocks_asks_for_no_others_that_are_not_there(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that nobody has stored costs two exchanges, however long it is, and a value of any kind one block."""
    harness = RedisHarness(redis_server.url, "long")
    connector = RedisConnector(replace(harness.settings, batch_bytes=LAYOUT.block_bytes))
    peer = Node(connector, "node", 64, LAYOUT, 1)
    exchanges: list[None] = []
    monkeypatch.setattr(connector._link.server, "succeeded", lambda: exchanges.append(None))
    assert await connector.fetch(None, blocks(64), timeout=5) == (FetchOutcome.MISSING,) * 64
    assert len(exchanges) == 2 and connector.stats.missing == 64

    _, held, huge, listed = blocks(4)
    await write_and_publish(peer, [held])
    exchanges.clear()
    with redis.Redis.from_url(redis_server.url) as client:
        client.set(harness.key(huge), bytes(1024 * LAYOUT.block_bytes))
        client.rpush(harness.key(listed), "x")
        sent_before = int(client.info("stats")["total_net_output_bytes"])
        outcomes = await connector.fetch(None, blocks(64), timeout=5)
        sent = int(client.info("stats")["total_net_output_bytes"]) - sent_before
    refused = FetchOutcome.REFUSED
    assert outcomes == (FetchOutcome.MISSING, FetchOutcome.FETCHED, refused, refused, *[FetchOutcome.MISSING] * 60)
    assert len(exchanges) == 1 + 1 + 3 + 2, "the first, what else is there, each block of it, and the deletion of two"
    assert sent < 3 * LAYOUT.block_bytes
    await connector.close()


async def test_storing_behind_another_tier_is_finished_when_redis_has_every_block(redis_server: RedisServer) -> None:
    harness = RedisHarness(redis_server.url, "drained")
    tiers: list[HostConnector] = [InProcessConnector(InProcessHub()), RedisConnector(harness.settings)]
    owner = Node(TieredConnector(tiers), "owner", 128, LAYOUT, 1)
    sent = blocks(100)
    for block in sent:
        owner.fill(block)
    await owner.connector.publish(sent)
    await owner.connector.finish_storing()
    with redis.Redis.from_url(redis_server.url) as client:
        assert client.exists(*map(harness.key, sent)) == 100
    await owner.connector.close()


async def test_closing_counts_the_blocks_that_still_wait_to_be_stored(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    tier = RedisConnector(RedisHarness(redis_server.url, "dropped").settings)
    tiers: list[HostConnector] = [InProcessConnector(InProcessHub()), tier]
    owner = Node(TieredConnector(tiers), "owner", 128, LAYOUT, 1)
    await owner.connector.publish(blocks(100))
    await owner.connector.close()
    assert tier.stats.lost_unstored == 100
    assert caplog.messages == ["100 blocks that waited to be stored in Redis are dropped"]


async def test_a_block_that_is_retracted_while_it_is_read_is_not_stored(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = node(RedisHarness(redis_server.url, "retracted").settings)
    assert isinstance(owner.connector, RedisConnector)
    pool = owner.connector._require().pool
    describe = pool.describe

    def overtaken(block: NamedBlock, epoch: int) -> BlockHeader:
        if block.block_id == 1:
            owner.connector.retract([1])
        return describe(block, epoch)

    monkeypatch.setattr(pool, "describe", overtaken)
    await write_and_publish(owner, blocks(3))
    result = await owner.connector.fetch(None, blocks(3), timeout=5)
    assert result == (FetchOutcome.FETCHED, FetchOutcome.MISSING, FetchOutcome.FETCHED)
    assert owner.first_stats.lost_unstored == 1
    await owner.connector.close()


async def test_blocks_that_are_lost_before_they_are_sent_say_nothing_of_the_server(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no exchange that could succeed: only the one before, which asks what Redis has."""
    connector = RedisConnector(RedisHarness(redis_server.url, "lost").settings)
    owner = Node(connector, "node", 16, LAYOUT, 1)
    succeeded: list[None] = []

    def counted() -> None:
        succeeded.append(None)
        connector.retract([0, 1])

    monkeypatch.setattr(connector._link.server, "succeeded", counted)
    with pytest.raises(KVError, match="none of 2"):
        await write_and_publish(owner, blocks(2))
    assert len(succeeded) == 1 and connector.stats.lost_unstored == 2
    await connector.close()


async def test_a_server_that_is_gone_fails_every_block(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    owner = node(RedisSettings(url=server.url))
    await write_and_publish(owner, blocks(2))
    server.stop()
    assert set(await owner.connector.fetch(None, blocks(2), timeout=5)) == {FetchOutcome.FAILED}
    with pytest.raises(KVError, match="none of 2"):
        await owner.connector.publish(blocks(2))
    await owner.connector.close()


async def test_a_server_that_never_answers_costs_no_more_than_the_deadline() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        peer = node(RedisSettings(url=url, operation_timeout_seconds=0.2))
        started = time.monotonic()
        result = await asyncio.wait_for(peer.connector.fetch(None, blocks(9), timeout=0.1), 5)
        assert set(result) == {FetchOutcome.FAILED} and time.monotonic() - started < 2
        with pytest.raises(KVError):
            await peer.connector.publish(blocks(1))
        await peer.connector.close()


@asynccontextmanager
async def answering(answer: bytes, *, always: bool = False) -> AsyncIterator[Node]:
    """Runs a server that answers every message, which may hold several commands, with these bytes, except those that
    begin a connection, unless `always`."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while command := await reader.read(4096):
            greets = b"HELLO" in command
            usual = b"%1\r\n+proto\r\n:3\r\n" if greets else b"+OK\r\n" * command.count(b"CLIENT\r\n")
            writer.write(answer if always else usual or answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    peer = node(RedisSettings(url=f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"))
    try:
        yield peer
    finally:
        await peer.connector.close()
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize(
    "answer",
    [
        b"-ERR upstream failure\r\n",
        b"*1\r\n$-1\r\n",
        b":1\r\n",
    ],
)
async def test_an_answer_that_is_no_value_fails_its_block(answer: bytes) -> None:
    """The first one is a proxy's in front of several servers, of which one is away. A server that says nothing else is
    left alone, and so is one with answers that are none at all."""
    for nothing in (b"$0\r\n\r\n", b"$-1\r\n"):
        async with answering(answer + nothing) as peer:
            for _ in range(4):
                outcomes = await peer.connector.fetch(None, blocks(2), timeout=5)
                assert outcomes == (FetchOutcome.FAILED, FetchOutcome.MISSING)
    for useless in (answer + answer, b":x\r\n"):
        async with answering(useless) as peer:
            for _ in range(4):
                assert set(await peer.connector.fetch(None, blocks(2), timeout=5)) == {FetchOutcome.FAILED}
            assert peer.first_stats.skipped == 2, "the fourth time it was not asked"


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("answer", [b"%1\r\n*1\r\n:1\r\n:1\r\n", b">2\r\n$1\r\n\x90\r\n$1\r\nx\r\n", b"?"])
async def test_an_answer_at_which_the_client_stumbles_fails_the_blocks(answer: bytes, always: bool) -> None:
    """A map with a list as a key, and a message with a kind that is no text: bytes that were damaged on the way. An
    error of another kind would end the request, or the node."""
    async with answering(answer, always=always) as peer:
        assert set(await peer.connector.fetch(None, blocks(2), timeout=5)) == {FetchOutcome.FAILED}
        with pytest.raises(KVError, match="none of 2"):
            await peer.connector.publish(blocks(2))


async def test_every_cancellation_ends_the_call(redis_server: RedisServer) -> None:
    """A node that stops, and a request that ends, rely on that, wherever the call is at the time."""
    owner = node(RedisHarness(redis_server.url, "cancelled").settings)

    async def publish_for_ever() -> None:
        while True:
            await owner.connector.publish(blocks(4))

    for num_turns in range(150):
        publishing = asyncio.create_task(publish_for_ever())
        for _ in range(num_turns):
            await asyncio.sleep(0)
        publishing.cancel()
        await asyncio.wait({publishing}, timeout=5)
        assert publishing.cancelled(), f"cancelled after {num_turns} turns of the loop, it goes on"
    await owner.connector.close()


@pytest.mark.parametrize("publishes", [True, False])
async def test_closing_during_a_call_raises_and_leaves_no_connection(
    redis_server: RedisServer, publishes: bool
) -> None:
    client = redis.Redis.from_url(redis_server.url)
    num_clients = len(client.client_list())
    for num_turns in range(3, 30, 3):
        prefix = f"closed-{publishes}-{num_turns}"
        owner = node(replace(RedisHarness(redis_server.url, prefix).settings, batch_bytes=1))
        await write_and_publish(owner, blocks(1 if publishes else 16))
        connector = owner.connector
        call = connector.publish(blocks(16)) if publishes else connector.fetch(None, blocks(16), timeout=5)
        under_way = asyncio.ensure_future(call)
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await connector.close()
        with pytest.raises(KVError):
            await asyncio.wait_for(under_way, 5)
        async with asyncio.timeout(5):
            while len(client.client_list()) > num_clients:
                await asyncio.sleep(0.01)
    client.close()


async def test_the_password_is_in_no_log_and_no_repr(caplog: pytest.LogCaptureFixture) -> None:
    settings = RedisSettings(url="redis://user:hunter2@127.0.0.1:1/0")
    assert "hunter2" not in repr(settings)
    peer = node(settings)
    await peer.connector.fetch(None, blocks(1), timeout=1)
    with pytest.raises(KVError) as raised:
        await peer.connector.publish(blocks(1))
    assert "hunter2" not in caplog.text + str(raised.value)
    assert "127.0.0.1:1" in caplog.text, "which server it is"
    await peer.connector.close()
    with pytest.raises(ConfigurationError, match="--redis-url") as invalid:
        node(RedisSettings(url="http://user:hunter2@host"))
    assert "hunter2" not in str(invalid.value)


@pytest.mark.parametrize(
    "url",
    [
        *("http://user:hunter2@host", "redis://user:hunter2@host:notaport/0", "redis://user:hunter2/@host/0"),
        *("redis://user:hunter2@host/0?unknown=1", "redis://user:hunter2@host/0?max_connections=many"),
        *("redis://user:hunter2@host/0?ssl_cert_reqs=none", "rediss://user:hunter2@host/0?ssl_cert_reqs=some"),
        *("redis://user:hunter2@host/0?decode_responses=True", "redis://user:hunter2@host/0?retry=1"),
    ],
)
async def test_a_url_that_cannot_work_is_refused_and_not_tried_again_later(url: str) -> None:
    """It is a wrong setting, not a problem that the self-test finds: that may pass with time."""
    with pytest.raises(ConfigurationError, match="--redis-url") as refused:
        await check_connector(lambda: RedisConnector(RedisSettings(url=url)))
    assert "hunter2" not in str(refused.value)
