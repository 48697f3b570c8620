"""Blocks are published in the order in which they were enqueued; a connector may fail; other errors are reported."""

import asyncio
from collections.abc import Sequence

import pytest

from kv_connector.in_process import InProcessConnector, InProcessHub
from kvrelay.core.errors import KVError
from kvrelay.core.kv.block_hash import BlockHash
from kvrelay.core.kv.named_block import NamedBlock
from kvrelay.core.outages import Outages
from kvrelay.node.publisher import Publisher
from tests.manual_clock import ManualClock
from tests.node.fake_node import make_node

BLOCKS = [NamedBlock(block_id, BlockHash(bytes([block_id]) * 32), 8) for block_id in range(3)]
PATIENCE = 10.0


def an_outage_log() -> Outages:
    return Outages(asyncio.get_running_loop().time)


class FailingConnector(InProcessConnector):
    def __init__(self, error: Exception) -> None:
        super().__init__(InProcessHub())
        self.error: Exception | None = error

    async def publish(self, blocks: Sequence[NamedBlock]) -> None:
        if self.error is not None:
            raise self.error


async def test_a_connector_that_fails_delays_no_callback_and_no_unpin() -> None:
    unpinned: list[int] = []
    told: list[tuple[int, bool]] = []
    connector = FailingConnector(KVError("not reachable"))
    publisher = Publisher(connector, unpinned.extend, an_outage_log())
    publisher.start(lambda error: pytest.fail(str(error)))
    for block in BLOCKS:
        publisher.enqueue([block], [lambda published, block_id=block.block_id: told.append((block_id, published))])  # type: ignore[misc]
    async with asyncio.timeout(PATIENCE):
        await publisher.drain()
        assert unpinned == [0, 1, 2]
        connector.error = None
        publisher.enqueue(BLOCKS[:1], [lambda published: told.append((0, published))])
        publisher.enqueue([], [lambda published: told.append((3, published))])
        await publisher.drain()
    await asyncio.sleep(0)
    assert told == [(0, False), (1, False), (2, False), (0, True), (3, True)], "what was offered before is there"
    await publisher.close()


async def test_draining_does_not_wait_for_what_is_enqueued_meanwhile() -> None:
    """Under load there is always more, and a failure that waits would be late."""

    class Busy(InProcessConnector):
        async def publish(self, blocks: Sequence[NamedBlock]) -> None:
            publisher.enqueue(BLOCKS[1:2])
            await asyncio.sleep(0)

    publisher = Publisher(Busy(InProcessHub()), lambda block_ids: None, an_outage_log())
    publisher.start(lambda error: pytest.fail(str(error)))
    publisher.enqueue(BLOCKS[:1])
    async with asyncio.timeout(PATIENCE):
        await publisher.drain()
    await publisher.close()


async def test_a_connector_that_keeps_failing_is_logged_once_and_so_is_its_return(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It fails at every step, many times a second, and a store may be down for hours."""
    caplog.set_level("INFO", "kvrelay.core.outages")
    clock = ManualClock()
    connector = FailingConnector(KVError("not reachable"))
    publisher = Publisher(connector, list[int]().extend, Outages(clock.now))
    publisher.start(lambda error: pytest.fail(str(error)))
    async with asyncio.timeout(PATIENCE):
        for error in (KVError("not reachable"), KVError("timed out"), None, None):
            connector.error = error
            clock.seconds += 20.0
            publisher.enqueue(BLOCKS)
            await publisher.drain()
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "3 blocks are not published: not reachable; not logged again while it fails"),
        ("INFO", "publishing works again; it failed 2 times"),
    ]
    await publisher.close()


class HangingConnector(InProcessConnector):
    """A connector whose every `publish` waits for an event and then fails."""

    def __init__(self) -> None:
        super().__init__(InProcessHub())
        self.calls: list[list[int]] = []
        self.let_go = asyncio.Event()

    async def publish(self, blocks: Sequence[NamedBlock]) -> None:
        self.calls.append([block.block_id for block in blocks])
        await self.let_go.wait()
        raise KVError("timed out")


async def test_blocks_that_wait_for_a_slow_store_are_published_together() -> None:
    """All of them cost one timeout. With one for each step, readers would wait for many."""
    connector, unpinned = HangingConnector(), list[int]()
    publisher = Publisher(connector, unpinned.extend, an_outage_log())
    publisher.start(lambda error: pytest.fail(str(error)))
    publisher.enqueue(BLOCKS[:1])
    await asyncio.sleep(0)
    for block in BLOCKS[1:]:
        publisher.enqueue([block])
    connector.let_go.set()
    async with asyncio.timeout(PATIENCE):
        await publisher.drain()
    assert connector.calls == [[0], [1, 2]]
    assert unpinned == [0, 1, 2]
    await publisher.close()


async def test_a_block_that_several_requests_offer_is_published_once_and_unpinned_as_often() -> None:
    """Every request offers the blocks that it has found; a store that lacks them would be sent each as often."""
    connector, unpinned = HangingConnector(), list[int]()
    publisher = Publisher(connector, unpinned.extend, an_outage_log())
    publisher.start(lambda error: pytest.fail(str(error)))
    publisher.enqueue([*BLOCKS[:2], *BLOCKS])
    await asyncio.sleep(0)
    publisher.enqueue(BLOCKS[:1])
    connector.let_go.set()
    async with asyncio.timeout(PATIENCE):
        await publisher.drain()
    assert connector.calls == [[0, 1, 2], [0]]
    assert unpinned == [0, 1, 0, 1, 2, 0]
    await publisher.close()


async def test_an_unforeseen_error_is_reported_and_still_unpins() -> None:
    unpinned: list[int] = []
    failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    publisher = Publisher(FailingConnector(RuntimeError("a fault of ours")), unpinned.extend, an_outage_log())
    publisher.start(failed.set_result)
    publisher.enqueue(BLOCKS[:2])
    publisher.enqueue(BLOCKS[2:])
    async with asyncio.timeout(PATIENCE):
        assert isinstance(await failed, RuntimeError)
    await publisher.close()
    assert unpinned == [0, 1, 2]


async def test_what_is_distrusted_is_discarded_after_what_was_enqueued_before() -> None:
    """Otherwise a store would get it after it has forgotten it."""
    events: list[object] = []

    class Store(InProcessConnector):
        async def publish(self, blocks: Sequence[NamedBlock]) -> None:
            events.append([block.block_hash for block in blocks])

        async def discard(self, names: Sequence[BlockHash]) -> None:
            events.append(("discard", list(names)))

    publisher = Publisher(Store(InProcessHub()), lambda block_ids: None, an_outage_log())
    publisher.start(lambda error: pytest.fail(str(error)))
    first, second, third = BLOCKS
    publisher.enqueue([first, second])
    publisher.discard([second.block_hash])
    publisher.discard([])
    async with asyncio.timeout(PATIENCE):
        await publisher.drain()
        publisher.enqueue([third])
        await publisher.drain()
    assert events == [
        [first.block_hash, second.block_hash],
        ("discard", [second.block_hash]),
        [third.block_hash],
    ]
    await publisher.close()


async def test_a_store_that_hangs_while_it_forgets_holds_up_no_callback_and_no_unpin() -> None:
    """Readers would wait for blocks that can be fetched. Draining waits for it."""
    begun, let_go = asyncio.Event(), asyncio.Event()
    events: list[object] = []

    class Store(InProcessConnector):
        async def discard(self, names: Sequence[BlockHash]) -> None:
            begun.set()
            await let_go.wait()
            events.append("forgotten")

    publisher = Publisher(Store(InProcessHub()), events.extend, an_outage_log())
    publisher.start(lambda error: pytest.fail(str(error)))
    publisher.discard([BLOCKS[0].block_hash])
    publisher.enqueue([], [events.append])
    draining = asyncio.ensure_future(publisher.drain())
    async with asyncio.timeout(PATIENCE):
        await begun.wait()
        assert events == [True] and not draining.done()
        let_go.set()
        await draining
    assert events == [True, "forgotten"]
    await publisher.close()


async def test_closing_publishes_nothing_more_and_unpins_what_waits() -> None:
    connector, unpinned = HangingConnector(), list[int]()
    publisher = Publisher(connector, unpinned.extend, an_outage_log())
    publisher.start(lambda error: pytest.fail(str(error)))
    publisher.enqueue(BLOCKS[:1])
    await asyncio.sleep(0)
    publisher.enqueue(BLOCKS[1:])
    await publisher.close()
    assert connector.calls == [[0]]
    assert unpinned == [0, 1, 2]


async def test_who_waits_until_the_queue_is_drained_does_not_wait_beyond_its_close() -> None:
    connector = HangingConnector()
    publisher = Publisher(connector, lambda block_ids: None, an_outage_log())
    publisher.start(lambda error: pytest.fail(str(error)))
    publisher.enqueue(BLOCKS[:1])
    async with asyncio.timeout(PATIENCE):
        while not connector.calls:
            await asyncio.sleep(0)
        draining = asyncio.ensure_future(publisher.drain())
        await asyncio.sleep(0)
        assert not draining.done()
        await publisher.close()
        await draining


async def test_a_node_whose_publisher_has_failed_counts_as_crashed() -> None:
    """Otherwise blocks would stay pinned until none can be allocated."""
    node = make_node()
    node.start(lambda result: None)

    def fault(published: bool) -> None:
        raise RuntimeError("a fault of ours")

    node._publisher.enqueue([], [fault])
    async with asyncio.timeout(PATIENCE):
        await node.crashed.wait()
    await node.close()
