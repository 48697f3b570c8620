"""The promises of the connector seam, tested with every backend."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import pytest

from kv_connector.base import FetchOutcome
from kv_connector.header import Mismatch
from kvrelay.core.errors import KVError
from kvrelay.core.kv.layout import KVLayout
from kvrelay.core.kv.named_block import NamedBlock
from kvrelay.core.kv.source import KVSource
from tests.kv_connector.backends import (
    EPOCH,
    LAYOUT,
    OTHER_LAYOUT,
    OTHER_SCALES,
    DeviceHarness,
    DeviceNode,
    DirectHarness,
    DirectNode,
    Harness,
    InProcessHarness,
    Node,
    RedisHarness,
    SharedMemoryHarness,
    TieredHarness,
    UcxHarness,
    blocks,
    content,
    moved,
    num_leading_fetched,
    write_and_publish,
)
from tests.loop_turns import counting_turns
from tests.redis_server import RedisServer

FETCHED, MISSING, REFUSED, FAILED = FetchOutcome
MakeNode = Callable[..., Node]


HOLDERS: dict[str, Callable[[], Harness]] = {
    "shared_memory": SharedMemoryHarness,
    "ucx": UcxHarness,
    "in_process": InProcessHarness,
}


CONNECTORS = ["shared_memory", "redis", "ucx", "in_process", "shared_memory,redis", "ucx,redis"]
ON_DEVICE = ["shared_memory on device", "redis on device", "ucx on device"]
DIRECT = ["cuda_ipc direct", "ucx direct", "cuda_ipc,ucx direct"]


@pytest.fixture(params=CONNECTORS + ON_DEVICE + DIRECT)
def harness(request: pytest.FixtureRequest) -> Harness | DirectHarness:
    names, _, place = request.param.partition(" on ")
    if names.endswith(" direct"):
        return DirectHarness(names.removesuffix(" direct"))
    found = _harness(request, names)
    return DeviceHarness(found) if place else found


def _harness(request: pytest.FixtureRequest, names: str) -> Harness:
    first, _, _ = names.partition(",")
    holder: Harness | None = HOLDERS[first]() if first in HOLDERS else None
    if names in HOLDERS:
        assert holder is not None
        return holder
    server: RedisServer = request.getfixturevalue("redis_server")
    store = RedisHarness(server.url, request.node.name)
    return store if holder is None else TieredHarness(holder, store)


@pytest.fixture
async def node(harness: Harness | DirectHarness) -> AsyncIterator[MakeNode]:
    """Makes nodes; closes them twice, and checks that no thread of theirs is left."""
    made: list[Node] = []

    def make(node_id: str, num_blocks: int = 64, layout: object = LAYOUT) -> Node:
        assert isinstance(layout, type(LAYOUT))
        epoch = EPOCH + len(made)
        if isinstance(harness, DirectHarness):
            made.append(DirectNode(harness.connector(), node_id, num_blocks, layout, epoch))
        else:
            kind = DeviceNode if isinstance(harness, DeviceHarness) else Node
            made.append(kind(harness.connector(), node_id, num_blocks, layout, epoch))
        return made[-1]

    yield make
    for each in made * 2:
        await each.connector.close()
    for each in made:
        if isinstance(each, DirectNode):
            await each.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("kv-")]


async def test_published_blocks_arrive_with_their_bytes(node: MakeNode) -> None:
    owner, peer = node("owner"), node("peer")
    assert not any(peer.pool.memory)
    sent = blocks(40, tail=5)
    await write_and_publish(owner, sent)
    wanted = moved(sent, 3)
    result = await peer.connector.fetch(owner.source, wanted, timeout=10)
    assert set(result) == {FETCHED} and num_leading_fetched(result) == 40
    for block in wanted:
        assert peer.row(block.block_id) == content(block.block_hash, LAYOUT.block_bytes)
    assert not any(peer.row(2)) and not any(peer.row(43))
    assert owner.first_stats.blocks_published == 40
    assert ",".join(peer.connector.all_stats()) == peer.connector.name
    assert peer.first_stats.blocks_fetched == 40
    assert peer.first_stats.bytes_fetched == owner.first_stats.bytes_published == 40 * LAYOUT.block_bytes


async def test_a_node_fetches_from_itself_and_without_a_source_only_from_a_store(
    node: MakeNode, harness: Harness | DirectHarness
) -> None:
    owner = node("owner")
    sent = blocks(3)
    await write_and_publish(owner, sent)
    wanted = moved(sent, 10)
    assert num_leading_fetched(await owner.connector.fetch(owner.source, wanted, timeout=10)) == 3
    assert owner.row(12) == owner.row(2)
    assert owner.connector.has_store == harness.has_store
    expected = FETCHED if harness.has_store else MISSING
    assert set(await owner.connector.fetch(None, wanted, timeout=10)) == {expected}
    assert await owner.connector.fetch(owner.source, [], timeout=10) == ()
    await owner.connector.publish([])


async def test_a_missing_block_does_not_keep_those_behind_it_away(node: MakeNode) -> None:
    owner, peer = node("owner"), node("peer")
    sent = blocks(4)
    await write_and_publish(owner, [sent[0], sent[1], sent[3]])
    result = await peer.connector.fetch(owner.source, sent, timeout=10)
    assert result == (FETCHED, FETCHED, MISSING, FETCHED)
    assert num_leading_fetched(result) == 2 and peer.first_stats.missing == 1


async def test_publishing_a_name_again_is_allowed(node: MakeNode) -> None:
    owner, peer = node("owner"), node("peer")
    sent = blocks(2)
    await write_and_publish(owner, sent)
    await owner.connector.publish(sent)
    assert owner.first_stats.blocks_published == 2, "what is there already is not published once more"
    await write_and_publish(owner, moved(sent, 8))  # a second copy of the same blocks
    owner.connector.retract([0, 1])
    assert set(await peer.connector.fetch(owner.source, sent, timeout=10)) == {FETCHED}


async def test_the_loop_turns_while_many_blocks_are_published(node: MakeNode) -> None:
    """Tokens wait for it."""
    owner = node("owner")  # whose 2 MiB are more than are digested at a time
    async with counting_turns() as num_turns:
        await write_and_publish(owner, blocks(64))
        assert num_turns() >= 2


async def test_retracted_blocks_are_missing(node: MakeNode, harness: Harness | DirectHarness) -> None:
    owner, peer = node("owner"), node("peer")
    sent = blocks(3)
    await write_and_publish(owner, sent)
    await asyncio.to_thread(owner.connector.retract, [1])
    result = await peer.connector.fetch(owner.source, sent, timeout=10)
    assert result == (FETCHED, FETCHED if harness.outlives_owner else MISSING, FETCHED)


async def test_discarded_blocks_are_nowhere(node: MakeNode) -> None:
    owner, peer = node("owner"), node("peer")
    sent = blocks(3)
    await write_and_publish(owner, sent)
    await asyncio.to_thread(owner.connector.retract, [1])
    await owner.connector.discard([sent[1].block_hash])
    await owner.connector.discard([])
    assert await peer.connector.fetch(owner.source, sent, timeout=10) == (FETCHED, MISSING, FETCHED)


async def test_blocks_of_a_closed_owner_come_only_from_a_store(
    node: MakeNode, harness: Harness | DirectHarness
) -> None:
    owner, peer = node("owner"), node("peer")
    sent = blocks(2)
    await write_and_publish(owner, sent)
    assert set(await peer.connector.fetch(owner.source, sent, timeout=10)) == {FETCHED}
    await owner.connector.close()
    result = await peer.connector.fetch(owner.source, sent, timeout=10)
    assert set(result) == {FETCHED if harness.outlives_owner else FAILED}
    owner.connector.retract([0])
    with pytest.raises(KVError):
        await owner.connector.publish(sent)
    with pytest.raises(KVError):
        await owner.connector.fetch(owner.source, sent, timeout=10)


async def test_closing_gives_the_memory_of_the_pool_back(node: MakeNode) -> None:
    owner = node("owner")
    await write_and_publish(owner, blocks(2))
    await owner.connector.close()
    if not isinstance(owner, DirectNode):  # whose pool belongs to the device
        buffer = owner.staging if isinstance(owner, DeviceNode) else owner.pool
        with pytest.raises(ValueError, match="released"):
            buffer.memory.tobytes()


@pytest.mark.parametrize("layout", [OTHER_LAYOUT, OTHER_SCALES], ids=["shape", "scales"])
async def test_another_layout_is_refused(layout: KVLayout, node: MakeNode) -> None:
    owner, peer = node("owner"), node("peer", layout=layout)
    sent = blocks(2)
    await write_and_publish(owner, sent)
    result = await peer.connector.fetch(owner.source, sent, timeout=10)
    assert set(result) == {REFUSED}
    assert peer.first_stats.refused[Mismatch.LAYOUT] == 2


async def test_another_number_of_tokens_is_refused(node: MakeNode) -> None:
    owner, peer = node("owner"), node("peer")
    sent = blocks(1, tail=5)
    await write_and_publish(owner, sent)
    wanted = [NamedBlock(0, sent[0].block_hash, 6)]
    assert await peer.connector.fetch(owner.source, wanted, timeout=10) == (REFUSED,)
    assert peer.first_stats.refused[Mismatch.TOKENS] == 1


async def test_another_epoch_is_refused_where_the_source_matters(
    node: MakeNode, harness: Harness | DirectHarness
) -> None:
    owner, peer = node("owner"), node("peer")
    sent = blocks(2)
    await write_and_publish(owner, sent)
    stale = KVSource("owner", owner.source.epoch + 7, owner.source.endpoint)
    result = await peer.connector.fetch(stale, sent, timeout=10)
    assert set(result) == {REFUSED if harness.has_source else FETCHED}
    assert peer.first_stats.refused[Mismatch.EPOCH] == (2 if harness.has_source else 0)


async def test_a_damaged_payload_is_refused_and_logged_once(
    node: MakeNode, harness: Harness | DirectHarness, caplog: pytest.LogCaptureFixture
) -> None:
    owner, peer = node("owner"), node("peer")
    sent = blocks(3)
    await write_and_publish(owner, sent)
    for count in (1, 2):
        harness.damage(owner, sent[1])
        result = await peer.connector.fetch(owner.source, sent, timeout=10)
        assert result == (FETCHED, REFUSED, FETCHED)
        assert peer.first_stats.refused[Mismatch.DIGEST] == count
        owner.connector.retract([1])
        await write_and_publish(owner, [sent[1]])  # the name can be used again
    assert caplog.text.count("refused 1 of 3 blocks") == 1
    assert set(await peer.connector.fetch(owner.source, sent, timeout=10)) == {FETCHED}


async def test_without_time_left_every_block_fails(node: MakeNode) -> None:
    owner, peer = node("owner"), node("peer")
    sent = blocks(2)
    await write_and_publish(owner, sent)
    assert set(await peer.connector.fetch(owner.source, sent, timeout=0.0)) == {FAILED}
    assert peer.first_stats.failed == 2


async def test_after_a_cancelled_fetch_nothing_is_written(node: MakeNode) -> None:
    owner, peer = node("owner", 512), node("peer", 512)
    sent = blocks(512)
    await write_and_publish(owner, sent)
    for turns in range(1, 12):
        task = asyncio.create_task(peer.connector.fetch(owner.source, sent, timeout=10))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        peer.pool.memory[:] = bytes(len(peer.pool.memory))
        await peer.connector.publish([NamedBlock(0, blocks(1, tag="other")[0].block_hash, 16)])  # behind any straggler
        assert not any(peer.pool.memory[:: LAYOUT.block_bytes])
    assert set(await peer.connector.fetch(owner.source, sent, timeout=10)) == {FETCHED}


async def test_blocks_that_keep_changing_are_never_fetched_with_wrong_content(node: MakeNode) -> None:
    """An engine keeps replacing blocks while a peer fetches them: whatever is FETCHED belongs to its name."""
    owner, peer = node("owner", 4), node("peer", 4)
    current = blocks(4, tag="0")
    await write_and_publish(owner, current)

    def overwrite(block: NamedBlock) -> None:
        owner.connector.retract([block.block_id])
        owner.fill(block)

    async def engine() -> None:
        for step in range(1, 60):
            block_id = step % 4
            block = NamedBlock(block_id, blocks(4, tag=str(step))[block_id].block_hash, 16)
            await asyncio.to_thread(overwrite, block)
            current[block_id] = block
            await owner.connector.publish([block])

    storm = asyncio.create_task(engine())
    fetched = 0
    while not storm.done() or fetched == 0:
        wanted = list(current)
        result = await peer.connector.fetch(owner.source, wanted, timeout=10)
        for block, outcome in zip(wanted, result, strict=True):
            if outcome is FETCHED:
                fetched += 1
                assert peer.row(block.block_id) == content(block.block_hash, LAYOUT.block_bytes)
    await storm
