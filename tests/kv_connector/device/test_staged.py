"""A pool on a device behind a smaller staging: which copies give way, and when slots and blocks may be used again."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest
import redis

from kv_connector.base import FetchOutcome
from kv_connector.device.staged import staging_blocks
from kv_connector.in_process import InProcessConnector, InProcessHub
from kvrelay.core.errors import ConfigurationError, KVError
from kvrelay.core.kv.named_block import NamedBlock
from tests.kv_connector.backends import (
    EPOCH,
    LAYOUT,
    DeviceNode,
    Harness,
    InProcessHarness,
    Node,
    RedisHarness,
    TieredHarness,
    blocks,
    content,
    moved,
    write_and_publish,
)
from tests.redis_server import RedisServer

FETCHED, MISSING, REFUSED, FAILED = FetchOutcome
SMALL = 8 * LAYOUT.block_bytes  # 2 slots for what arrives, 6 for copies


class Pair:
    """A holder and a reader of 64 blocks, each on a device."""

    def __init__(self) -> None:
        hub = InProcessHub()
        self.owner, self.peer = (
            DeviceNode(InProcessConnector(hub), name, 64, LAYOUT, EPOCH, staging_bytes=SMALL)
            for name in ("owner", "peer")
        )

    async def fetch(self, count: int, *, timeout: float = 10.0, name: str = "owner") -> tuple[FetchOutcome, ...]:
        """Fetches from the holder; under another name it is another source."""
        source = replace(self.owner.source, node_id=name)
        return await self.peer.connector.fetch(source, blocks(count), timeout=timeout)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    made = Pair()
    yield made
    for node in (made.owner, made.peer):
        node.device.gate.set()
        await node.connector.close()
        assert node.device._staging is None


async def test_the_oldest_copies_give_way(pair: Pair) -> None:
    sent = blocks(10)
    await write_and_publish(pair.owner, sent)
    assert await pair.fetch(10) == (MISSING,) * 4 + (FETCHED,) * 6
    for block in sent[4:]:
        assert pair.peer.row(block.block_id) == content(block.block_hash, LAYOUT.block_bytes)
    assert pair.owner.staged.forgets
    await pair.owner.connector.publish(sent[:2])  # found by name: asked for again
    await pair.owner.connector.publish(sent[6:8])
    assert pair.owner.device.num_to_host == 12, "those that were there are not copied again"
    assert await pair.fetch(10) == (FETCHED,) * 2 + (MISSING,) * 4 + (FETCHED,) * 4
    await pair.owner.connector.publish(sent[2:4])
    assert await pair.fetch(10) == (FETCHED,) * 4 + (MISSING,) * 2 + (FETCHED,) * 2 + (MISSING,) * 2


async def test_more_is_fetched_than_the_staging_holds(pair: Pair) -> None:
    await write_and_publish(pair.owner, blocks(6))
    assert await pair.fetch(6) == (FETCHED,) * 6
    assert pair.peer.device.num_from_host == 6


async def test_a_retracted_block_gives_its_slot_back(pair: Pair) -> None:
    for turn in range(5):
        sent = blocks(6, tag=str(turn))
        await write_and_publish(pair.owner, sent)
        pair.owner.connector.retract([block.block_id for block in sent])
    assert pair.owner.device.num_to_host == 30
    assert len(pair.owner.staged._copies._free) == 6


async def test_a_block_that_changes_while_it_is_copied_is_not_published(pair: Pair) -> None:
    sent = blocks(2)
    for block in sent:
        pair.owner.fill(block)
    pair.owner.device.gate.clear()
    publishing = asyncio.create_task(pair.owner.connector.publish(sent))
    await asyncio.to_thread(pair.owner.device.waiting.wait, 10)
    pair.owner.connector.retract([0])
    pair.owner.device.gate.set()
    await publishing
    assert await pair.fetch(2) == (MISSING, FETCHED)
    assert pair.owner.first_stats.blocks_published == 1, "not for a moment: the slot may hold bytes of both"
    assert len(pair.owner.staged._copies._free) == 5


async def test_a_copy_that_gives_way_is_missing_before_its_slot_is_written(pair: Pair) -> None:
    await write_and_publish(pair.owner, blocks(6))
    pair.owner.device.waiting.clear()
    pair.owner.device.gate.clear()
    publishing = asyncio.create_task(pair.owner.connector.publish(moved(blocks(1, tag="new"), 6)))
    await asyncio.to_thread(pair.owner.device.waiting.wait, 10)
    assert await pair.fetch(2) == (MISSING, FETCHED)
    pair.owner.device.gate.set()
    await publishing


async def test_of_two_copies_of_a_block_one_is_kept(pair: Pair) -> None:
    pair.owner.fill(blocks(1)[0])
    await asyncio.gather(*(pair.owner.connector.publish(blocks(1)) for _ in range(2)))
    assert pair.owner.device.num_to_host == 2
    assert await pair.fetch(1) == (FETCHED,)
    pair.owner.connector.retract([0])
    assert await pair.fetch(1) == (MISSING,)
    assert len(pair.owner.staged._copies._free) == 6


class SlowPublisher(InProcessConnector):
    """A connector whose publications wait until `open` is set."""

    def __init__(self, hub: InProcessHub) -> None:
        super().__init__(hub)
        self.num_waiting = 0
        self.open = asyncio.Event()

    async def publish(self, blocks: Sequence[NamedBlock]) -> None:
        self.num_waiting += 1
        await self.open.wait()
        await super().publish(blocks)


async def test_a_slot_that_is_being_published_is_given_to_nobody_else() -> None:
    """Otherwise the first name would be published over the bytes of the third block."""
    hub = InProcessHub()
    inner = SlowPublisher(hub)
    owner = DeviceNode(inner, "owner", 64, LAYOUT, EPOCH, staging_bytes=SMALL)
    peer = DeviceNode(InProcessConnector(hub), "peer", 64, LAYOUT, EPOCH, staging_bytes=SMALL)
    names = [moved(blocks(3, tag=str(turn)), 3 * turn) for turn in range(3)]
    publications = []
    for sent in names:
        for block in sent:
            owner.fill(block)
        publications.append(asyncio.create_task(owner.connector.publish(sent)))
    while inner.num_waiting < 2:
        await asyncio.sleep(0)
    with pytest.raises(KVError, match="no staging slot for 3 blocks"):
        await publications[2]
    owner.connector.retract([block.block_id for block in names[0]])
    with pytest.raises(KVError, match="no staging slot"):
        await owner.connector.publish(names[2])
    inner.open.set()
    await asyncio.gather(*publications[:2])
    for sent, outcome in zip(names, (MISSING, FETCHED, MISSING), strict=True):
        assert set(await peer.connector.fetch(owner.source, sent, timeout=10)) == {outcome}
    await owner.connector.publish(names[2])
    assert set(await peer.connector.fetch(owner.source, names[2], timeout=10)) == {FETCHED}
    for node in (owner, peer):
        await node.connector.close()


class FailsEverySecondTime(InProcessConnector):
    _num_calls = 0

    async def publish(self, blocks: Sequence[NamedBlock]) -> None:
        self._num_calls += 1
        if self._num_calls % 2 == 0:
            raise KVError("told to fail")
        await super().publish(blocks)


async def test_blocks_that_are_published_in_part_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    owner = DeviceNode(FailsEverySecondTime(InProcessHub()), "owner", 64, LAYOUT, EPOCH, staging_bytes=SMALL)
    for turn in range(3):
        await write_and_publish(owner, blocks(6, tag=str(turn)))
    assert caplog.messages == ["some of 6 blocks are not published: told to fail; not logged again while it fails"]
    await owner.connector.close()


@pytest.mark.parametrize("is_behind", [False, True])
async def test_a_store_is_offered_a_block_again_though_its_copy_is_still_there(
    redis_server: RedisServer, is_behind: bool
) -> None:
    """Its values expire, and it may have lost some. `is_behind`: behind another tier."""
    store = RedisHarness(redis_server.url, f"again-{is_behind}")
    harness: Harness = TieredHarness(InProcessHarness(), store) if is_behind else store
    owner = DeviceNode(harness.connector(), "owner", 64, LAYOUT, EPOCH, staging_bytes=SMALL)
    (block,) = blocks(1)
    await write_and_publish(owner, [block])
    with redis.Redis.from_url(redis_server.url) as client:
        client.expire(store.key(block), 30)
        await write_and_publish(owner, [block])
        assert 30 < int(client.ttl(store.key(block))) <= 60
        client.delete(store.key(block))
        await write_and_publish(owner, [block])
    assert owner.device.num_to_host == 1
    assert await owner.connector.fetch(None, moved([block], 9), timeout=10) == (FETCHED,)
    assert owner.row(9) == content(block.block_hash, LAYOUT.block_bytes)
    await owner.connector.close()


class SlowStore(SlowPublisher):
    has_store = True


async def test_a_copy_that_a_store_is_offered_again_gives_way_to_nobody_meanwhile() -> None:
    """A store behind other tiers reads it late, when its slot would hold another block."""
    hub = InProcessHub()
    inner = SlowStore(hub)
    owner = DeviceNode(inner, "owner", 64, LAYOUT, EPOCH, staging_bytes=SMALL)
    peer = DeviceNode(InProcessConnector(hub), "peer", 64, LAYOUT, EPOCH, staging_bytes=SMALL)
    first, second, third = (moved(blocks(3, tag=str(turn)), 3 * turn) for turn in range(3))
    inner.open.set()
    await write_and_publish(owner, first)
    inner.open.clear()
    publications = [asyncio.create_task(owner.connector.publish(first))]
    publications.append(asyncio.create_task(write_and_publish(owner, second)))
    async with asyncio.timeout(10):
        while inner.num_waiting < 3:
            await asyncio.sleep(0)
    with pytest.raises(KVError, match="no staging slot for 3 blocks"):
        await write_and_publish(owner, third)
    owner.connector.retract([first[1].block_id])
    inner.open.set()
    await asyncio.gather(*publications)
    assert await peer.connector.fetch(owner.source, first, timeout=10) == (FETCHED, MISSING, FETCHED)
    assert set(await peer.connector.fetch(owner.source, second, timeout=10)) == {FETCHED}
    assert owner.device.num_to_host == 6
    assert len(owner.staged._copies._free) == 1
    for node in (owner, peer):
        await node.connector.close()


class FailingStore(FailsEverySecondTime):
    has_store = True


async def test_a_copy_that_a_store_does_not_take_again_stays() -> None:
    hub = InProcessHub()
    owner = DeviceNode(FailingStore(hub), "owner", 64, LAYOUT, EPOCH, staging_bytes=SMALL)
    peer = DeviceNode(InProcessConnector(hub), "peer", 64, LAYOUT, EPOCH, staging_bytes=SMALL)
    await write_and_publish(owner, blocks(2))
    with pytest.raises(KVError, match="told to fail"):
        await owner.connector.publish(blocks(2))
    assert set(await peer.connector.fetch(owner.source, blocks(2), timeout=10)) == {FETCHED}
    await owner.connector.publish(blocks(2))
    assert owner.device.num_to_host == 2
    with pytest.raises(KVError, match="told to fail"):
        await write_and_publish(owner, [blocks(2)[0], *moved(blocks(1, tag="new"), 2)])
    assert set(await peer.connector.fetch(owner.source, blocks(2), timeout=10)) == {FETCHED}
    assert len(owner.staged._copies._free) == 4, "that of the new one is free again"
    for node in (owner, peer):
        await node.connector.close()


async def test_another_name_for_a_block_replaces_its_copy(pair: Pair) -> None:
    first, second = blocks(1, tag="tail", tail=5), blocks(1, tag="full")
    await write_and_publish(pair.owner, first)
    pair.owner.device.waiting.clear()
    pair.owner.device.gate.clear()
    publishing = asyncio.create_task(write_and_publish(pair.owner, second))
    await asyncio.to_thread(pair.owner.device.waiting.wait, 10)
    source = pair.owner.source
    assert await pair.peer.connector.fetch(source, first, timeout=10) == (MISSING,), "before its slot is written"
    pair.owner.device.gate.set()
    await publishing
    assert await pair.peer.connector.fetch(source, first, timeout=10) == (MISSING,)
    assert await pair.peer.connector.fetch(source, second, timeout=10) == (FETCHED,)


async def test_a_fetch_that_is_cancelled_while_blocks_go_to_the_device_waits_for_them(pair: Pair) -> None:
    await write_and_publish(pair.owner, blocks(1))
    pair.peer.device.gate.clear()
    fetch = asyncio.create_task(pair.fetch(1))
    await asyncio.to_thread(pair.peer.device.waiting.wait, 10)
    for _ in range(3):
        fetch.cancel()
        await asyncio.wait([fetch], timeout=0.001)
        assert not fetch.done(), "the device still writes"
    pair.peer.device.gate.set()
    await asyncio.wait([fetch], timeout=10)
    assert fetch.cancelled()
    assert await pair.fetch(1) == (FETCHED,), "the slots are free again"


async def test_fetches_that_wait_for_a_slot_go_on_as_soon_as_one_is_given_back(pair: Pair) -> None:
    await write_and_publish(pair.owner, blocks(1))
    assert await pair.fetch(1) == (FETCHED,)
    pair.peer.device.gate.clear()
    fetches = [asyncio.create_task(pair.fetch(1, timeout=60, name=name)) for name in "abab"]
    while pair.peer.staged._arrivals._free:
        await asyncio.sleep(0)
    done, _ = await asyncio.wait(fetches, timeout=0.01)
    assert not done
    pair.peer.device.gate.set()
    assert await asyncio.wait_for(asyncio.gather(*fetches), 10) == [(FETCHED,)] * 4


async def test_fetches_that_get_no_slot_in_time_fail_and_are_logged_once(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    await write_and_publish(pair.owner, blocks(3))
    pair.peer.device.gate.clear()
    stuck = [asyncio.create_task(pair.fetch(1, name=name)) for name in "ab"]
    await asyncio.to_thread(pair.peer.device.waiting.wait, 10)
    while pair.peer.staged._arrivals._free:
        await asyncio.sleep(0)
    for _ in range(3):
        assert await pair.fetch(3, timeout=0.01) == (FAILED,) * 3
    assert caplog.text.count("raise --kv-staging-gib") == 1
    pair.peer.device.gate.set()
    assert await asyncio.gather(*stuck) == [(FETCHED,)] * 2


async def test_a_damaged_copy_never_reaches_the_device(pair: Pair) -> None:
    await write_and_publish(pair.owner, blocks(2))
    pair.owner.staged_row(1)[9] ^= 1
    assert await pair.fetch(2) == (FETCHED, REFUSED)
    assert pair.peer.device.num_from_host == 1 and not any(pair.peer.row(1))


async def test_a_device_that_fails_publishes_nothing_and_fetches_nothing(pair: Pair) -> None:
    await write_and_publish(pair.owner, blocks(1))
    pair.owner.device.broken = pair.peer.device.broken = True
    with pytest.raises(KVError, match="the device is gone"):
        await pair.owner.connector.publish(moved(blocks(2, tag="new"), 7))
    with pytest.raises(KVError, match="the device is gone"):
        await pair.fetch(1)
    pair.owner.device.broken = pair.peer.device.broken = False
    await write_and_publish(pair.owner, moved(blocks(6, tag="new"), 7))  # no slot was lost
    assert await pair.fetch(1) == (MISSING,)


async def test_publications_beyond_the_slots_raise(pair: Pair) -> None:
    pair.owner.device.gate.clear()
    names = [blocks(3, tag=str(turn)) for turn in range(3)]
    publications = [
        asyncio.create_task(pair.owner.connector.publish(moved(sent, 3 * turn))) for turn, sent in enumerate(names)
    ]
    await asyncio.to_thread(pair.owner.device.waiting.wait, 10)
    pair.owner.device.gate.set()
    ended = await asyncio.gather(*publications, return_exceptions=True)
    assert [str(error) for error in ended if error is not None] == ["no staging slot for 3 blocks"]


async def test_closing_waits_for_the_device_and_then_nothing_moves() -> None:
    pair = Pair()
    await write_and_publish(pair.owner, blocks(1))
    pair.peer.device.gate.clear()
    fetch = asyncio.create_task(pair.fetch(1))
    await asyncio.to_thread(pair.peer.device.waiting.wait, 10)
    closing = asyncio.create_task(pair.peer.connector.close())
    await asyncio.wait([closing], timeout=0.001)
    assert not closing.done()
    pair.peer.device.gate.set()
    await closing
    assert await fetch == (FETCHED,)
    with pytest.raises(KVError):
        await pair.fetch(1)
    with pytest.raises(KVError):
        await pair.peer.connector.publish(blocks(1))
    pair.peer.connector.retract([0])
    await pair.owner.connector.close()


async def test_a_staged_pool_and_one_on_the_host_exchange_blocks() -> None:
    hub = InProcessHub()
    device = DeviceNode(InProcessConnector(hub), "device", 8, LAYOUT, EPOCH)
    host = Node(InProcessConnector(hub), "host", 8, LAYOUT, EPOCH)
    assert device.connector.name == host.connector.name
    for owner, peer in ((device, host), (host, device)):
        sent = blocks(4, tag=owner.source.node_id)
        await write_and_publish(owner, sent)
        assert set(await peer.connector.fetch(owner.source, sent, timeout=10)) == {FETCHED}
        assert peer.row(3) == owner.row(3)
    for node in (device, host):
        await node.connector.close()


def test_the_staging_holds_a_whole_small_pool_within_its_limit() -> None:
    assert staging_blocks(LAYOUT, 64, 1 << 30) * 3 // 4 >= 64, "all of a small pool"
    assert staging_blocks(LAYOUT, 1, 1 << 30) == 8
    assert staging_blocks(LAYOUT, 1 << 20, 1 << 30) == (1 << 30) // LAYOUT.block_bytes
    with pytest.raises(ConfigurationError, match="raise --kv-staging-gib"):
        staging_blocks(LAYOUT, 64, 7 * LAYOUT.block_bytes)
