"""Several connectors over one pool: which tier is asked for which block, for how long, and what is reported."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest

from kv_connector.base import FetchOutcome, FetchOutcomes, HostConnector, PoolBuffer
from kv_connector.header import Mismatch
from kv_connector.in_process import InProcessConnector, InProcessHub
from kv_connector.segments.shared_memory import SharedMemoryConnector
from kv_connector.settings import RedisSettings, SharedMemorySettings, UcxSettings
from kv_connector.store.redis_store import RedisConnector
from kv_connector.tiered import TieredConnector
from kv_connector.ucx.connector import UcxConnector
from kvrelay.core.clock import MonotonicClock
from kvrelay.core.errors import ConfigurationError, KVError
from kvrelay.core.kv.endpoints import this_host
from kvrelay.core.kv.layout import KVLayout
from kvrelay.core.kv.named_block import NamedBlock
from kvrelay.core.kv.source import KVSource
from tests.kv_connector.backends import (
    CLUSTER_SECRET,
    EPOCH,
    LAYOUT,
    Node,
    RedisHarness,
    blocks,
    content,
    moved,
    write_and_publish,
)
from tests.manual_clock import ManualClock
from tests.redis_server import RedisServer

FETCHED, MISSING, REFUSED, FAILED = FetchOutcome
PATIENCE = 10.0


class Tier(InProcessConnector):
    """A tier that can be told to hang, to fail, or to take all of its time, which passes on `clock`."""

    def __init__(self, hub: InProcessHub, name: str = "in_process", clock: ManualClock | None = None) -> None:
        super().__init__(hub)
        self.name = name
        self.clock = clock or ManualClock()
        self.hangs = False
        self.is_slow = False
        self.fails = False
        self.fetches: list[tuple[int, float]] = []  # blocks and seconds
        self.retracted: list[int] = []

    async def publish(self, blocks: Sequence[NamedBlock]) -> None:
        if self.fails:
            raise KVError("told to fail")
        await super().publish(blocks)

    def retract(self, block_ids: Sequence[int]) -> None:
        self.retracted += block_ids
        super().retract(block_ids)

    async def fetch(self, source: KVSource | None, blocks: Sequence[NamedBlock], *, timeout: float) -> FetchOutcomes:
        self.fetches.append((len(blocks), timeout))
        if self.fails:
            raise KVError("told to fail")
        if self.hangs:
            await asyncio.Event().wait()
        if self.is_slow:
            self.clock.seconds += timeout
            return (FAILED,) * len(blocks)
        return await super().fetch(source, blocks, timeout=timeout)


class Pair:
    """Two nodes of two tiers each, without Redis."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.hubs = (InProcessHub(), InProcessHub())
        self.owner, self.owner_tiers = self._make("owner")
        self.peer, self.peer_tiers = self._make("peer")

    def _make(self, node_id: str) -> tuple[Node, list[Tier]]:
        tiers = [Tier(hub, name, self.clock) for hub, name in zip(self.hubs, ("first", "second"), strict=True)]
        return Node(TieredConnector(tiers, clock=self.clock), node_id, 64, LAYOUT, EPOCH), tiers

    async def fetch(self, wanted: Sequence[NamedBlock]) -> tuple[FetchOutcome, ...]:
        result = await self.peer.connector.fetch(self.owner.source, wanted, timeout=PATIENCE)
        for block, outcome in zip(wanted, result, strict=True):
            if outcome is FETCHED:
                assert self.peer.row(block.block_id) == content(block.block_hash, LAYOUT.block_bytes)
        return result


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    made = Pair()
    yield made
    for node in (made.owner, made.peer):
        await node.connector.close()
    assert not made.hubs[0].pools and not made.hubs[1].pools


async def test_blocks_that_the_first_tier_has_are_not_requested_from_the_second(pair: Pair) -> None:
    sent = blocks(5)
    await write_and_publish(pair.owner, sent)
    assert set(await pair.fetch(sent)) == {FETCHED}
    assert not pair.peer_tiers[1].fetches
    assert pair.peer.first_stats.blocks_fetched == 5


async def test_only_the_blocks_that_the_first_tier_lacks_are_requested_from_the_second(pair: Pair) -> None:
    sent = blocks(4)
    await write_and_publish(pair.owner, sent)
    pair.owner_tiers[0].retract([1, 2])
    pair.owner_tiers[1].retract([2])
    assert await pair.fetch(sent) == (FETCHED, FETCHED, MISSING, FETCHED)
    assert [count for count, _ in pair.peer_tiers[1].fetches] == [2]


async def test_a_tier_that_fails_or_is_slow_leaves_time_for_the_next(pair: Pair) -> None:
    sent = blocks(3)
    await write_and_publish(pair.owner, sent)
    pair.peer_tiers[0].fails = True
    assert set(await pair.fetch(sent)) == {FETCHED}
    pair.peer_tiers[0].fails, pair.peer_tiers[0].is_slow = False, True
    assert set(await pair.fetch(sent)) == {FETCHED}
    assert [tier.fetches[-1][1] for tier in pair.peer_tiers] == [PATIENCE / 2] * 2
    pair.peer_tiers[1].is_slow = True
    assert set(await pair.fetch(sent)) == {FAILED}


async def test_a_block_that_one_tier_finds_missing_is_missing_though_another_one_fails(pair: Pair) -> None:
    """The holder was reached, and is to be asked for other blocks."""
    sent = blocks(4)
    await write_and_publish(pair.owner, sent)
    pair.owner_tiers[1].retract([2])
    pair.peer_tiers[0].fails = True
    assert await pair.fetch(sent) == (FETCHED, FETCHED, MISSING, FETCHED)
    pair.owner_tiers[0].retract([1])
    pair.peer_tiers[0].fails, pair.peer_tiers[1].fails = False, True
    assert await pair.fetch(sent) == (FETCHED, MISSING, FETCHED, FETCHED)
    pair.peer_tiers[0].fails = True
    assert set(await pair.fetch(sent)) == {FAILED}


async def test_a_block_that_is_damaged_in_the_first_tier_comes_from_the_second(pair: Pair) -> None:
    """The first tier refuses the block and counts it; its content is right in the end."""
    sent = blocks(3)
    await write_and_publish(pair.owner, sent)
    shared = pair.owner_tiers[0]._shared
    assert shared is not None
    digest = shared.headers[1].payload_digest
    shared.headers[1] = replace(shared.headers[1], payload_digest=bytes([digest[0] ^ 1]) + digest[1:])
    assert set(await pair.fetch(sent)) == {FETCHED}
    assert pair.peer_tiers[0].stats.refused[Mismatch.DIGEST] == 1
    assert pair.peer_tiers[1].stats.blocks_fetched == 1
    pair.peer_tiers[1].fails = True
    assert await pair.fetch(sent) == (FETCHED, REFUSED, FETCHED), "that no tier reaches the holder would be wrong"
    pair.peer_tiers[1].fails = False
    pair.owner_tiers[1].retract([1])
    assert await pair.fetch(sent) == (FETCHED, REFUSED, FETCHED), "so would be that the holder has no such block"


async def test_publication_fails_only_when_every_tier_does(pair: Pair) -> None:
    sent = blocks(2)
    pair.owner_tiers[0].fails = True
    await write_and_publish(pair.owner, sent)
    assert set(await pair.fetch(sent)) == {FETCHED}
    pair.owner_tiers[1].fails = True
    with pytest.raises(KVError, match="told to fail"):
        await pair.owner.connector.publish(sent)


async def test_a_tier_that_fails_at_every_call_is_logged_once_and_so_is_its_return(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    """Nodes publish and fetch many times a second."""
    caplog.set_level("INFO", "kvrelay.core.outages")
    sent = blocks(2)
    pair.owner_tiers[0].fails = pair.peer_tiers[0].fails = True
    for _ in range(3):
        await write_and_publish(pair.owner, sent)
        assert set(await pair.fetch(sent)) == {FETCHED}
        assert set(await pair.peer.connector.fetch(KVSource("other", 1, "?"), sent, timeout=PATIENCE)) == {FAILED}
    pair.owner_tiers[0].fails = pair.peer_tiers[0].fails = False
    pair.clock.seconds += 10
    await write_and_publish(pair.owner, sent)
    await pair.fetch(sent)
    assert caplog.messages == [
        "2 blocks are published through some tiers only: told to fail; not logged again while it fails",
        "fetching through first failed: told to fail; not logged again while it fails",
        "node other cannot be asked: not an endpoint: '?'; not logged again while it fails",
        "publishing through every tier works again; it failed 3 times",
        "fetching through first works again; it failed 3 times",
    ]


async def test_retractions_reach_every_tier(pair: Pair) -> None:
    sent = blocks(2)
    await write_and_publish(pair.owner, sent)
    pair.owner.connector.retract([0, 1])
    assert [tier.retracted for tier in pair.owner_tiers] == [[0, 1], [0, 1]]
    assert set(await pair.fetch(sent)) == {MISSING}


async def test_after_a_cancelled_fetch_nothing_is_written(pair: Pair) -> None:
    sent = blocks(8)
    await write_and_publish(pair.owner, sent)
    pair.peer_tiers[0].hangs = True
    task = asyncio.create_task(pair.fetch(sent))
    while not pair.peer_tiers[0].fetches:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() and not any(pair.peer.pool.memory)


async def test_without_a_source_only_stores_are_asked(pair: Pair, redis_server: RedisServer) -> None:
    sent = blocks(3)
    await write_and_publish(pair.owner, sent)
    assert set(await pair.peer.connector.fetch(None, sent, timeout=PATIENCE)) == {MISSING}
    assert not pair.peer_tiers[0].fetches
    store = RedisConnector(RedisSettings(url=redis_server.url, key_prefix="nowhere"))
    tier = Tier(InProcessHub())
    tiers: list[HostConnector] = [tier, store]
    node = Node(TieredConnector(tiers), "node", 8, LAYOUT, EPOCH)
    await write_and_publish(node, sent)
    wanted = moved(sent, 4)
    assert set(await node.connector.fetch(None, wanted, timeout=PATIENCE)) == {FETCHED}
    assert not tier.fetches and node.row(6) == content(sent[2].block_hash, LAYOUT.block_bytes)
    await node.connector.close()


async def test_a_source_that_no_tier_reaches_fails_without_a_fetch(pair: Pair) -> None:
    for endpoint in ("", "nonsense", f"host={this_host()};other=1"):
        source = KVSource("x", 1, endpoint)
        assert set(await pair.peer.connector.fetch(source, blocks(2), timeout=1)) == {FAILED}
    assert not pair.peer_tiers[0].fetches


# -- shared memory, UCX and Redis over one pool ----------------------------------------------------------------------


def three(redis_url: str, prefix: str) -> list[HostConnector]:
    return [
        SharedMemoryConnector(SharedMemorySettings()),
        UcxConnector(UcxSettings(CLUSTER_SECRET)),
        RedisConnector(RedisSettings(url=redis_url, key_prefix=prefix)),
    ]


async def test_three_tiers_share_one_pool_and_leave_nothing(redis_server: RedisServer) -> None:
    """The same block is fetched through each tier, after those before it have lost it, and from the store."""
    owner = Node(TieredConnector(three(redis_server.url, "three")), "owner", 16, LAYOUT, EPOCH)
    peer = Node(TieredConnector(three(redis_server.url, "three")), "peer", 16, LAYOUT, EPOCH + 1)
    sent = blocks(6)
    await write_and_publish(owner, sent)
    assert isinstance(owner.connector, TieredConnector)
    all_stats = peer.connector.all_stats()
    for position, tier in enumerate(owner.connector.tiers):
        peer.pool.memory[:] = bytes(len(peer.pool.memory))
        source = None if tier.has_store else owner.source
        result = await peer.connector.fetch(source, moved(sent, 4), timeout=PATIENCE)
        assert set(result) == {FETCHED}
        assert [stats.blocks_fetched for stats in all_stats.values()] == [6] * (position + 1) + [0] * (2 - position)
        for block in moved(sent, 4):
            assert peer.row(block.block_id) == content(block.block_hash, LAYOUT.block_bytes)
        tier.retract([block.block_id for block in sent])
    assert list(all_stats) == ["shared_memory", "ucx", "redis"]
    for node in (owner, peer, owner):
        await node.connector.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("kv-")]


async def test_a_block_with_a_flipped_byte_in_shared_memory_comes_from_redis(redis_server: RedisServer) -> None:
    harness = RedisHarness(redis_server.url, "made-good")
    owner = Node(shared_memory_and(harness), "owner", 8, LAYOUT, EPOCH)
    peer = Node(shared_memory_and(harness), "peer", 8, LAYOUT, EPOCH)
    sent = blocks(4)
    await write_and_publish(owner, sent)
    owner.row(2)[77] ^= 1
    result = await peer.connector.fetch(owner.source, sent, timeout=PATIENCE)
    assert result == (FETCHED, FETCHED, REFUSED, FETCHED)
    result = await peer.connector.fetch(None, [sent[2]], timeout=PATIENCE)
    assert result == (FETCHED,)
    assert peer.row(2) == content(sent[2].block_hash, LAYOUT.block_bytes)
    assert peer.first_stats.refused[Mismatch.DIGEST] == 1
    assert peer.connector.all_stats()["redis"].blocks_fetched == 1
    for node in (owner, peer):
        await node.connector.close()


def shared_memory_and(harness: RedisHarness) -> TieredConnector[HostConnector]:
    return TieredConnector([SharedMemoryConnector(SharedMemorySettings()), harness.connector()])


async def test_what_is_discarded_is_forgotten_by_the_store_behind_another_tier(redis_server: RedisServer) -> None:
    harness = RedisHarness(redis_server.url, "forgotten")
    node = Node(shared_memory_and(harness), "node", 8, LAYOUT, EPOCH)
    sent = blocks(3)
    await write_and_publish(node, sent)
    await node.connector.finish_storing()
    assert set(await node.connector.fetch(None, moved(sent, 4), timeout=PATIENCE)) == {FETCHED}
    await node.connector.discard([block.block_hash for block in sent[1:]])
    assert await node.connector.fetch(None, moved(sent, 4), timeout=PATIENCE) == (FETCHED, MISSING, MISSING)
    await node.connector.close()


async def test_shared_memory_of_another_host_is_not_tried(redis_server: RedisServer) -> None:
    owner = Node(TieredConnector(three(redis_server.url, "far")[:2]), "owner", 8, LAYOUT, EPOCH)
    peer = Node(TieredConnector(three(redis_server.url, "far")[:2], host="0123456789abcdef"), "peer", 8, LAYOUT, EPOCH)
    await write_and_publish(owner, blocks(2))
    assert set(await peer.connector.fetch(owner.source, blocks(2), timeout=PATIENCE)) == {FETCHED}
    assert [stats.blocks_fetched for stats in peer.connector.all_stats().values()] == [0, 2]
    assert peer.first_stats.failed == 0
    for node in (owner, peer):
        await node.connector.close()


async def test_nodes_of_different_tiers_use_those_they_share() -> None:
    shared_memory, ucx = SharedMemorySettings(), UcxSettings(CLUSTER_SECRET)
    owner = Node(TieredConnector([SharedMemoryConnector(shared_memory)]), "owner", 8, LAYOUT, EPOCH)
    tiers: list[HostConnector] = [SharedMemoryConnector(shared_memory), UcxConnector(ucx)]
    both = Node(TieredConnector(tiers), "both", 8, LAYOUT, EPOCH)
    other = Node(TieredConnector([UcxConnector(ucx)]), "other", 8, LAYOUT, EPOCH)
    sent = blocks(2)
    await write_and_publish(owner, sent)
    await write_and_publish(both, sent)

    async def outcome(reader: Node, holder: Node) -> set[FetchOutcome]:
        return set(await reader.connector.fetch(holder.source, moved(sent, 4), timeout=PATIENCE))

    assert await outcome(both, owner) == await outcome(owner, both) == await outcome(other, both) == {FETCHED}
    assert await outcome(other, owner) == {FAILED}
    for node in (owner, both, other):
        await node.connector.close()


def test_shared_memory_refuses_a_pool_of_another_connector() -> None:
    memory = PoolBuffer(memoryview(bytearray(LAYOUT.block_bytes)), LAYOUT, 1)
    with pytest.raises(ConfigurationError, match="must come first"):
        SharedMemoryConnector(SharedMemorySettings()).allocate(LAYOUT, 1, node_id="n", epoch=1, buffer=memory)


# -- the cost gate ---------------------------------------------------------------------------------------------------


async def test_a_store_slower_than_computing_is_skipped_and_counted(redis_server: RedisServer) -> None:
    store = RedisConnector(RedisSettings(url=redis_server.url, key_prefix="gate"))
    tiers: list[HostConnector] = [Tier(InProcessHub()), store]
    tiered = TieredConnector(tiers, recompute_seconds=lambda num_tokens: 1e-9 * num_tokens)
    node = Node(tiered, "node", 8, LAYOUT, EPOCH)
    await write_and_publish(node, blocks(3))
    wanted = moved(blocks(3), 4)
    absent = blocks(1, tag="absent")
    assert set(await tiered.fetch(None, absent, timeout=PATIENCE)) == {MISSING}, "which says nothing of it"
    assert set(await tiered.fetch(None, wanted, timeout=PATIENCE)) == {FETCHED}
    assert set(await tiered.fetch(None, wanted, timeout=PATIENCE)) == {MISSING}
    assert store.stats.not_worth == 3 and store.stats.blocks_fetched == 3
    await tiered.close()


async def test_a_tier_that_is_no_store_or_the_only_one_is_asked_whatever_computing_takes(
    redis_server: RedisServer,
) -> None:
    """A node that has nothing but a store has no endpoint, and its blocks are asked for there."""
    store = RedisConnector(RedisSettings(url=redis_server.url, key_prefix="no-gate"))
    for tiers in ([Tier(InProcessHub(), "first"), Tier(InProcessHub(), "second")], [store]):
        tiered = TieredConnector[HostConnector](tiers, recompute_seconds=lambda num_tokens: 0.0)
        node = Node(tiered, "node", 8, LAYOUT, EPOCH)
        await write_and_publish(node, blocks(3))
        for before in tiers[:-1]:
            before.retract([0, 1, 2])
        for _ in range(2):
            assert set(await tiered.fetch(node.source, moved(blocks(3), 4), timeout=PATIENCE)) == {FETCHED}
        await tiered.close()


def test_every_tier_serves_from_the_same_rows() -> None:
    layout = KVLayout(num_kv_heads=1, num_layers=1, block_size=8, head_dim=8, dtype="float32")
    tiers = [Tier(InProcessHub(), "first"), Tier(InProcessHub(), "second")]
    buffer = TieredConnector(tiers, clock=MonotonicClock()).allocate(layout, 4, node_id="n", epoch=1)
    buffer.memory[layout.block_bytes] = 7
    for tier in tiers:
        assert tier._shared is not None
        assert tier._shared.pool.rows[1, 0] == 7
