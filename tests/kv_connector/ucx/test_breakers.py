"""When a reader gives a holder up, for the rest of a fetch and for a while."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator

import pytest

from kv_connector.base import FetchOutcome
from kv_connector.settings import UcxSettings
from kv_connector.ucx import reader as reader_module
from kv_connector.ucx.connector import UcxConnector
from kv_connector.ucx.protocol import MAX_ASK_BLOCKS
from kv_connector.ucx.reader import LANES
from kvrelay.core.kv import source_breakers
from kvrelay.core.kv.source import KVSource
from tests.kv_connector.backends import CLUSTER_SECRET, EPOCH, LAYOUT, Node, blocks, write_and_publish
from tests.kv_connector.ucx.peers import peers_of, ucx_node
from tests.manual_clock import ManualClock

NUM_BLOCKS = 3 * LANES * MAX_ASK_BLOCKS  # one fetch of so many consists of three rounds


class Reader(Node):
    """A node whose breakers' clock only moves when a test moves it."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        connector = UcxConnector(UcxSettings(CLUSTER_SECRET), clock=self.clock)
        super().__init__(connector, "reader", NUM_BLOCKS, LAYOUT, EPOCH)

    async def fetch(self, source: KVSource, *, timeout: float = 60) -> FetchOutcome:
        [outcome] = await self.connector.fetch(source, blocks(1), timeout=timeout)
        return outcome

    async def leaves_alone(self, source: KVSource) -> bool:
        before = self.first_stats.skipped
        assert await self.fetch(source) is FetchOutcome.FAILED
        return self.first_stats.skipped > before


@pytest.fixture
async def reader() -> AsyncIterator[Reader]:
    made = Reader()
    yield made
    await made.connector.close()


@pytest.fixture
def port() -> Iterator[socket.socket]:
    """A port at which nobody listens yet."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound


def source_at(port: socket.socket, node_id: str = "lost") -> KVSource:
    return KVSource(node_id, EPOCH, f"127.0.0.1:{port.getsockname()[1]}")


async def test_a_holder_that_says_nothing_is_not_asked_for_the_other_parts(
    reader: Reader, port: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would cost the time of a handshake."""
    monkeypatch.setattr(reader_module, "HANDSHAKE_SECONDS", 0.05)
    port.listen()  # the kernel accepts, nobody answers
    port.setblocking(False)
    outcomes = await reader.connector.fetch(source_at(port), blocks(NUM_BLOCKS), timeout=60)
    assert set(outcomes) == {FetchOutcome.FAILED}
    with pytest.raises(BlockingIOError):
        for _ in range(LANES + 1):
            port.accept()[0].close()


async def test_a_trial_that_says_nothing_is_followed_by_another(reader: Reader, port: socket.socket) -> None:
    """One whose caller leaves, and one that had too little time."""
    source = source_at(port)
    assert [await reader.leaves_alone(source) for _ in range(4)] == [False] * 3 + [True]
    port.listen()  # the kernel accepts, nobody answers
    reader.clock.seconds += 60.0
    cancelled = asyncio.create_task(reader.fetch(source))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait([cancelled], timeout=10)
    assert cancelled.cancelled()
    for _ in range(2):
        assert await reader.fetch(source, timeout=0.05) is FetchOutcome.FAILED
    assert reader.first_stats.skipped == 1


@pytest.mark.parametrize("answers_others", [True, False])
async def test_fetches_that_end_before_their_turn_count_only_if_the_holder_answers_nobody(
    reader: Reader, answers_others: bool
) -> None:
    """Under load a fetch waits for those before it, since all of them share the lanes of the holder."""
    holder = ucx_node("holder", num_blocks=1)
    await write_and_publish(holder, blocks(1))
    assert await reader.fetch(holder.source) is FetchOutcome.FETCHED
    [peer] = peers_of(reader)
    assert isinstance(reader.connector, UcxConnector)
    peer._turns = taken = asyncio.Semaphore(0)
    waiting = [asyncio.create_task(reader.fetch(holder.source)) for _ in range(3)]
    async with asyncio.timeout(10.0):
        while len(taken._waiters or ()) < len(waiting):
            await asyncio.sleep(0)
    under_way = list(reader.connector._require().fetches)
    peer._turns = asyncio.Semaphore(LANES)
    if answers_others:
        assert await reader.fetch(holder.source) is FetchOutcome.FETCHED
    for fetch in under_way:
        await fetch.expire()
    assert await asyncio.gather(*waiting) == [FetchOutcome.FAILED] * 3
    assert await reader.fetch(holder.source) is (FetchOutcome.FETCHED if answers_others else FetchOutcome.FAILED)
    assert reader.first_stats.skipped == (not answers_others)
    await holder.connector.close()


async def test_a_fetch_of_nothing_says_nothing_of_its_holder(reader: Reader, port: socket.socket) -> None:
    for _ in range(3):
        assert await reader.connector.fetch(source_at(port), [], timeout=60) == ()
    assert not await reader.leaves_alone(source_at(port))


async def test_the_oldest_of_many_lost_holders_is_forgotten_and_none_for_those_that_answer(
    reader: Reader, port: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_breakers, "_CAPACITY", 3)
    holders = [ucx_node("holder", num_blocks=1) for _ in range(2)]
    lost = [source_at(port, f"lost-{index}") for index in range(4)]
    for holder in holders:
        await write_and_publish(holder, blocks(1))
    for source in lost[:2]:
        assert [await reader.leaves_alone(source) for _ in range(4)] == [False] * 3 + [True]
    for holder in holders:
        assert await reader.fetch(holder.source) is FetchOutcome.FETCHED
    assert [await reader.leaves_alone(source) for source in lost[:3]] == [True, True, False]
    assert await reader.fetch(holders[0].source) is FetchOutcome.FETCHED
    assert [await reader.leaves_alone(source) for source in (lost[3], lost[1], lost[0])] == [False, True, False]
    for holder in holders:
        await holder.connector.close()
