"""A real Redis that dies, comes back, stops answering, is full, refuses writes, evicts, forgets and lies.

Nothing wrong is ever fetched, nothing takes longer than it may, and what was left alone is asked again.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from kv_connector.base import AccessDeniedError, FetchOutcome, HostConnector
from kv_connector.header import HEADER_BYTES, Mismatch
from kv_connector.segments.shared_memory import SharedMemoryConnector
from kv_connector.settings import RedisSettings, SharedMemorySettings
from kv_connector.store.redis_store import RedisConnector
from kv_connector.tiered import TieredConnector
from kvrelay.core.errors import KVError
from kvrelay.core.kv.named_block import NamedBlock
from tests.kv_connector.backends import EPOCH, LAYOUT, Node, blocks, content, write_and_publish
from tests.kv_connector.settled import settled
from tests.manual_clock import ManualClock
from tests.redis_server import RedisServer

FETCHED, MISSING, REFUSED, FAILED = FetchOutcome
TIMEOUT = 0.1  # of one exchange, while Redis is silent
PATIENCE = 10.0  # of one exchange elsewhere: a machine that runs other tests beside these may stand still for a moment
PREFIX = "kvrelay"


class Setup:
    """A Redis of its own, a node that stores only there, and one with Redis behind shared memory. The breakers' clock
    only moves when a test moves it."""

    def __init__(self, directory: Path, server: RedisServer) -> None:
        self.directory = directory
        self.server = server
        self.clock = ManualClock()
        settings = RedisSettings(url=self.server.url, key_prefix=PREFIX, operation_timeout_seconds=PATIENCE)
        self.store = RedisConnector(settings, clock=self.clock)
        self.node = Node(self.store, "plain", 64, LAYOUT, EPOCH)
        patient = RedisSettings(url=self.server.url, key_prefix=PREFIX, operation_timeout_seconds=30.0)
        self.tier = RedisConnector(patient, clock=self.clock)
        tiers: list[HostConnector] = [SharedMemoryConnector(SharedMemorySettings()), self.tier]
        self.behind = Node(TieredConnector(tiers), "behind", 64, LAYOUT, EPOCH)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.server.pid, number)

    async def fetch(self, wanted: list[NamedBlock], timeout: float = 10.0) -> tuple[FetchOutcome, ...]:
        outcomes = await self.node.connector.fetch(None, wanted, timeout=timeout)
        for block, outcome in zip(wanted, outcomes, strict=True):
            if outcome is FETCHED:
                assert self.node.row(block.block_id) == content(block.block_hash, LAYOUT.block_bytes)
        return outcomes

    def client(self) -> "redis.Redis":
        return redis.Redis.from_url(self.server.url)


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.stop()


@pytest.fixture
def setup(tmp_path: Path, own_server: RedisServer) -> Iterator[Setup]:
    made = Setup(tmp_path, own_server)
    yield made
    made.server.stop()  # a test may have put another in place


@pytest.fixture(autouse=True)
async def closed(setup: Setup) -> AsyncIterator[None]:
    yield
    await setup.node.connector.close()
    await setup.behind.connector.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def open_breaker(setup: Setup) -> None:
    for _ in range(3):
        assert set(await setup.fetch(blocks(2))) == {FAILED}


async def test_a_redis_that_dies_is_not_asked_until_it_is_back(setup: Setup) -> None:
    sent = blocks(3)
    await write_and_publish(setup.node, sent)
    port = setup.server.port
    setup.server.stop()
    await open_breaker(setup)
    assert setup.store.stats.skipped == 0
    setup.server = RedisServer(setup.directory, port=port)
    assert set(await setup.fetch(sent)) == {FAILED}
    with pytest.raises(KVError, match="none of 3"):
        await setup.node.connector.publish(sent)
    assert setup.store.stats.skipped == 6, "neither asked it"
    setup.clock.seconds += 1.0
    assert set(await setup.fetch(sent)) == {MISSING}, "it is back, and empty"
    await write_and_publish(setup.node, sent)
    assert set(await setup.fetch(sent)) == {FETCHED}


async def test_behind_another_tier_a_dead_redis_fails_and_delays_nothing(setup: Setup) -> None:
    setup.server.stop()
    reader = Node(TieredConnector([SharedMemoryConnector(SharedMemorySettings())]), "reader", 64, LAYOUT, EPOCH)
    for turn in range(6):
        sent = blocks(4, tag=str(turn), first_id=4 * turn)
        await write_and_publish(setup.behind, sent)
        assert set(await reader.connector.fetch(setup.behind.source, sent, timeout=10)) == {FETCHED}
    assert setup.tier.stats.failed == 24 and setup.tier.stats.skipped == 12, "asked three times"
    await reader.connector.close()


async def test_a_stopped_redis_costs_at_most_the_deadline_and_then_nothing(setup: Setup) -> None:
    sent = blocks(3)
    await write_and_publish(setup.node, sent)
    setup.signal(signal.SIGSTOP)
    setup.store._link._timeout = TIMEOUT
    for _ in range(3):
        assert set(await setup.fetch(sent, timeout=3600.0)) == {FAILED}
    for _ in range(100):
        assert set(await setup.fetch(sent)) == {FAILED}
    assert setup.store.stats.skipped == 300, "left alone"
    setup.signal(signal.SIGCONT)
    setup.store._link._timeout = PATIENCE
    setup.clock.seconds += 1.0
    assert set(await setup.fetch(sent)) == {FETCHED}, "and no answer to an old question is taken for a new one"
    await write_and_publish(setup.node, blocks(3, tag="new"))
    assert set(await setup.fetch(blocks(3, tag="new"))) == {FETCHED}


async def test_publishing_behind_another_tier_does_not_wait_for_a_stopped_redis(setup: Setup) -> None:
    """Blocks that are retracted before Redis gets them are never stored."""
    setup.signal(signal.SIGSTOP)
    sent = blocks(8)
    for block in sent:
        setup.behind.fill(block)
    await setup.behind.connector.publish(sent)
    assert (setup.tier.stats.blocks_published, setup.tier.stats.failed) == (0, 0), "still waits for Redis"
    setup.behind.connector.retract([5])
    setup.behind.row(5)[:] = bytes(LAYOUT.block_bytes)
    setup.signal(signal.SIGCONT)
    await settled(setup.behind.connector)
    outcomes = await setup.fetch(sent)
    assert outcomes == (FETCHED,) * 5 + (MISSING,) + (FETCHED,) * 2
    stats = setup.tier.stats
    assert (stats.blocks_published, stats.lost_unstored, stats.failed) == (7, 1, 0)


async def test_closing_drops_what_still_waits_for_a_stopped_redis(setup: Setup) -> None:
    setup.signal(signal.SIGSTOP)
    await setup.behind.connector.publish(blocks(8))
    await asyncio.sleep(0)
    async with asyncio.timeout(10.0):
        await setup.behind.connector.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_fetch_with_hardly_any_time_does_not_open_the_breaker(setup: Setup) -> None:
    setup.signal(signal.SIGSTOP)
    for _ in range(10):
        assert set(await setup.fetch(blocks(1), timeout=0.001)) == {FAILED}
    setup.signal(signal.SIGCONT)
    assert set(await setup.fetch(blocks(1))) == {MISSING}
    assert setup.store.stats.skipped == 0


async def test_a_full_redis_still_serves_but_gets_no_more_blocks(setup: Setup) -> None:
    """After it has refused a block it gets no others for a while, instead of one refusal for each."""
    sent = blocks(2)
    await write_and_publish(setup.node, sent)
    with setup.client() as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", "1mb")
        with pytest.raises(KVError):
            await write_and_publish(setup.node, blocks(40, tag="more"))
        assert setup.store.stats.skipped > 0
        assert set(await setup.fetch(sent)) == {FETCHED}
        with pytest.raises(KVError):
            await write_and_publish(setup.node, blocks(2, tag="even more"))
        await setup.node.connector.publish(sent)  # is there: its life begins again
        client.config_set("maxmemory", "0")
    setup.clock.seconds += 1.0
    await write_and_publish(setup.node, blocks(2, tag="even more"))
    assert set(await setup.fetch(blocks(2, tag="even more"))) == {FETCHED}


REFUSALS = {  # commands after which it refuses to write, and those that put an end to that
    "a replica": ("REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE"),
    "too few replicas": ("CONFIG SET min-replicas-to-write 1", "CONFIG SET min-replicas-to-write 0"),
    "no permission": ("ACL SETUSER default -set", "ACL SETUSER default +set"),
}


@pytest.mark.parametrize("refusal", REFUSALS)
async def test_a_redis_that_refuses_writes_is_sent_few_blocks_and_still_serves(setup: Setup, refusal: str) -> None:
    """Each refusal is an answer, and costs a whole block. Nor are blocks sent that it has and does not renew."""
    refuse, permit = (command.split() for command in REFUSALS[refusal])
    sent, more = blocks(40), blocks(40, tag="more")
    await write_and_publish(setup.node, sent)
    with setup.client() as client:
        client.execute_command(*refuse)
        before = client.info("stats")["total_net_input_bytes"]
        for _ in range(20):
            with pytest.raises(KVError, match="none of 40"):
                await write_and_publish(setup.node, more)
        if refusal != "no permission":  # which is for SET alone
            with pytest.raises(KVError, match="none of 40"):
                await setup.node.connector.publish(sent)
        received = client.info("stats")["total_net_input_bytes"] - before
        assert received < len(more) * LAYOUT.block_bytes, "not even once all of them"
        assert set(await setup.fetch(sent)) == {FETCHED}
        client.execute_command(*permit)
    setup.clock.seconds += 1.0
    await write_and_publish(setup.node, more)
    assert set(await setup.fetch(more)) == {FETCHED}


async def test_a_redis_that_refused_a_block_is_tried_again_though_the_next_was_lost_before(setup: Setup) -> None:
    with setup.client() as client:
        client.execute_command("ACL", "SETUSER", "default", "-set")
        await write_and_publish(setup.behind, blocks(1))
        client.execute_command("ACL", "SETUSER", "default", "+set")
    setup.clock.seconds += 1.0
    await setup.behind.connector.publish(blocks(1))
    setup.behind.connector.retract([0])
    await settled(setup.behind.connector)
    assert (setup.tier.stats.blocks_published, setup.tier.stats.lost_unstored) == (0, 1)
    await write_and_publish(setup.behind, blocks(1))
    assert setup.tier.stats.blocks_published == 1


async def test_blocks_that_redis_evicts_are_missing(setup: Setup) -> None:
    with setup.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        used = int(client.info("memory")["used_memory"])
        client.config_set("maxmemory", str(used + 20 * LAYOUT.block_bytes))
        sent = blocks(60)
        await write_and_publish(setup.node, sent)
    outcomes = await setup.fetch(sent)
    assert set(outcomes) == {FETCHED, MISSING} and setup.store.stats.missing == outcomes.count(MISSING)


async def test_a_flush_during_a_fetch_makes_blocks_missing(setup: Setup) -> None:
    setup.store._settings = replace(setup.store._settings, batch_bytes=4 * LAYOUT.block_bytes)
    sent = blocks(60)
    await write_and_publish(setup.node, sent)
    setup.node.pool.memory[:] = bytes(len(setup.node.pool.memory))
    fetch = asyncio.create_task(setup.fetch(sent))
    with setup.client() as client:
        while not any(setup.node.row(0)):
            await asyncio.sleep(0)
        client.flushall()
    assert set(await fetch) == {FETCHED, MISSING}
    assert set(await setup.fetch(sent)) == {MISSING}
    await write_and_publish(setup.node, sent)
    assert set(await setup.fetch(sent)) == {FETCHED}


async def test_nothing_is_asked_for_behind_a_part_that_failed(setup: Setup) -> None:
    """What arrives of a later part must not be taken for what did not arrive."""
    setup.store._settings = replace(setup.store._settings, batch_bytes=1)
    sent = blocks(3)
    await write_and_publish(setup.node, sent)
    others = [f"~{PREFIX}:{sent[index].block_hash.hex()}" for index in (0, 2)]
    with setup.client() as client:
        client.execute_command("ACL", "SETUSER", "default", "resetkeys", *others)
    assert await setup.fetch(sent) == (FETCHED, FAILED, FAILED)
    setup.server.stop()
    for num_skipped in (0, 0, 3):
        assert await setup.fetch(sent) == (FAILED, FAILED, FAILED)
        assert setup.store.stats.skipped == num_skipped


@pytest.mark.parametrize(
    "how", ["flipped", "layout", "tokens", "short", "a byte", "long", "another block", "no header", "not a string"]
)
async def test_wrong_values_are_refused_and_deleted(setup: Setup, how: str) -> None:
    sent = blocks(2)
    await write_and_publish(setup.node, sent)
    key, other = (f"{PREFIX}:{block.block_hash.hex()}" for block in sent)
    with setup.client() as client:
        value = client.get(key)
        another = client.get(other)
        assert isinstance(value, bytes) and isinstance(another, bytes)
        match how:
            case "flipped":
                client.set(key, value[:500] + bytes([value[500] ^ 0x20]) + value[501:])
            case "layout" | "tokens":
                at = {"layout": 40, "tokens": 64}[how]  # see header.py
                client.set(key, value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :])
            case "short":
                client.set(key, value[:-1])
            case "a byte":
                client.set(key, value[:1])
            case "long":
                client.set(key, value + b"x")
            case "another block":
                client.set(key, another)
            case "no header":
                client.set(key, bytes(HEADER_BYTES) + value[HEADER_BYTES:])
            case _:
                client.delete(key)
                client.lpush(key, value)
        assert await setup.fetch(sent) == (REFUSED, FETCHED)
        assert sum(setup.store.stats.refused.values()) == 1
        assert setup.store.stats.refused[Mismatch.DIGEST] == (how == "flipped")
        assert setup.store.stats.refused[Mismatch.LENGTH] == (how in ("short", "a byte", "long"))
        assert not client.exists(key)
    await write_and_publish(setup.node, sent)
    assert set(await setup.fetch(sent)) == {FETCHED}


async def test_values_of_another_type_alone_are_no_failure_of_the_server(setup: Setup) -> None:
    """They are answers. Whoever wrote them may do so again."""
    [block] = blocks(1)
    with setup.client() as client:
        for num_refused in range(1, 5):
            client.lpush(f"{PREFIX}:{block.block_hash.hex()}", "x")
            assert await setup.fetch([block]) == (REFUSED,)
            assert sum(setup.store.stats.refused.values()) == num_refused


async def test_a_huge_value_costs_no_more_than_a_block(setup: Setup) -> None:
    """It is somebody else's; with all of it, the exchange would take too long, again and again."""
    sent = blocks(2)
    await write_and_publish(setup.node, sent)
    with setup.client() as client:
        client.append(f"{PREFIX}:{sent[0].block_hash.hex()}", bytes(16 << 20))
        before = client.info("stats")["total_net_output_bytes"]
        assert await setup.fetch(sent) == (REFUSED, FETCHED)
        assert client.info("stats")["total_net_output_bytes"] - before < 3 * LAYOUT.block_bytes
    assert setup.store.stats.refused[Mismatch.LENGTH] == 1
    await write_and_publish(setup.node, sent)
    assert set(await setup.fetch(sent)) == {FETCHED}


async def test_a_server_that_is_sent_nothing_has_not_succeeded(setup: Setup) -> None:
    """Otherwise a dead one would be asked again at once."""
    setup.server.stop()
    await open_breaker(setup)
    setup.clock.seconds += 1.0
    await setup.node.connector.publish([])
    assert setup.store._link.server.is_open


@pytest.mark.parametrize("credentials", ["", ":wr0ng-passw0rd@", "nobody:wr0ng-passw0rd@"])
@pytest.mark.parametrize("protocol", [2, 3])
async def test_a_password_that_the_server_refuses_is_told_apart_and_not_repeated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, credentials: str, protocol: int
) -> None:
    server = RedisServer(tmp_path, options=["--requirepass", "s3cr3t-passw0rd"])
    try:
        url = f"{server.url.replace('//', f'//{credentials}')}?protocol={protocol}"
        connector = RedisConnector(RedisSettings(url=url, key_prefix=PREFIX))
        node = Node(connector, "plain", 64, LAYOUT, EPOCH)
        with pytest.raises(AccessDeniedError, match="another user or password than --redis-url has") as raised:
            await write_and_publish(node, blocks(1))
        await connector.close()
    finally:
        server.stop()
    assert "passw0rd" not in f"{raised.value}{caplog.text}"


@pytest.mark.parametrize("secret", ["", "s3cr3t-passw0rd"])
async def test_a_server_without_hello_stores_and_brings_blocks(tmp_path: Path, secret: str) -> None:
    """Redis before version 6, and proxies, know no other protocol than RESP2."""
    server = RedisServer(tmp_path, options=["--requirepass", secret, "--rename-command", "HELLO", ""])
    try:
        connector = RedisConnector(RedisSettings(url=server.url.replace("//", f"//:{secret}@"), key_prefix=PREFIX))
        node = Node(connector, "plain", 64, LAYOUT, EPOCH)
        sent = blocks(3)
        await write_and_publish(node, sent)
        assert set(await connector.fetch(None, sent, timeout=10.0)) == {FETCHED}
        await connector.close()
    finally:
        server.stop()


async def test_a_password_that_a_server_repeats_is_not_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As those do that lack a command, among them Redis before version 6 and proxies, with a protocol they lack."""
    secret = "s3cr3t-passw0rd"
    server = RedisServer(tmp_path, options=["--requirepass", secret, "--rename-command", "HELLO", ""])
    try:
        url = f"{server.url.replace('//', f'//:{secret}@')}?protocol=3"
        connector = RedisConnector(RedisSettings(url=url, key_prefix=PREFIX))
        Node(connector, "plain", 64, LAYOUT, EPOCH)
        assert await connector.fetch(None, blocks(1), timeout=10.0) == (FAILED,)
        await connector.close()
    finally:
        server.stop()
    assert "unknown command 'HELLO'" in caplog.text
    assert secret not in caplog.text
