"""What a holder of UCX allows its readers: how many may be strangers, what they may ask, and how long they may take."""

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from kv_connector.base import FetchOutcome
from kv_connector.settings import UcxSettings
from kv_connector.ucx import holder as holder_module
from kv_connector.ucx.connector import UcxConnector
from kv_connector.ucx.holder import HANDSHAKE_SECONDS, MAX_STRANGERS, Holder
from kv_connector.ucx.protocol import ASK_POSITION, OPENING_BYTES, encode_ask
from kv_connector.ucx.reader import Lane
from kv_connector.ucx.transport import LinkLostError, Transport
from tests.kv_connector.backends import CLUSTER_SECRET, EPOCH, LAYOUT, Node, blocks, write_and_publish

FETCHED = FetchOutcome.FETCHED


def node(node_id: str) -> Node:
    return Node(UcxConnector(UcxSettings(CLUSTER_SECRET)), node_id, 4, LAYOUT, EPOCH)


@pytest.fixture
async def holder() -> AsyncIterator[Node]:
    made = node("holder")
    await write_and_publish(made, blocks(4))
    yield made
    await made.connector.close()


@pytest.fixture
async def reader() -> AsyncIterator[Node]:
    made = node("reader")
    yield made
    await made.connector.close()


def side(holder: Node) -> Holder:
    assert isinstance(holder.connector, UcxConnector)
    return holder.connector._require().holder


async def lane_of(reader: Node, holder: Node) -> Lane:
    """Returns the connection over which the reader has just fetched."""
    assert await reader.connector.fetch(holder.source, blocks(1), timeout=10) == (FETCHED,)
    assert isinstance(reader.connector, UcxConnector)
    [peer] = reader.connector._require().peers.values()
    [lane] = peer._idle
    return lane


async def test_strangers_that_come_together_are_no_more_than_may_be(holder: Node) -> None:
    transport = Transport("")
    host, _, port = holder.source.endpoint.rpartition(":")
    links = [transport.connect(host, int(port)) for _ in range(MAX_STRANGERS + 64)]
    tasks = side(holder)._tasks
    async with asyncio.timeout(HANDSHAKE_SECONDS):
        while len(tasks) + holder.first_stats.peers_refused < len(links):
            await asyncio.sleep(0)
    assert len(tasks) == MAX_STRANGERS
    for link in links:
        await link.close()
    transport.close()


async def test_an_ask_that_is_too_large_ends_the_connection(holder: Node, reader: Node) -> None:
    lane = await lane_of(reader, holder)
    lane.link.send(np.full(4, 0xFF, np.uint8), lane.tag + ASK_POSITION)
    with pytest.raises(LinkLostError):
        await asyncio.wait_for(lane.link.greeting(OPENING_BYTES), 10)
    assert holder.first_stats.peers_refused == 1
    await lane_of(reader, holder)


async def test_a_reader_that_takes_nothing_of_what_it_asks_for_is_dropped(
    holder: Node, reader: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = await lane_of(reader, holder)
    monkeypatch.setattr(holder_module, "SEND_SECONDS", 0.05)
    lane.link.send(np.frombuffer(encode_ask([blocks(1)[0].block_hash]), np.uint8), lane.tag + ASK_POSITION)
    with pytest.raises(LinkLostError):
        await asyncio.wait_for(lane.link.greeting(OPENING_BYTES), 10)


async def test_a_reader_that_asks_for_nothing_more_is_dropped_and_may_come_again(
    holder: Node, reader: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await lane_of(reader, holder)
    with monkeypatch.context() as patch:
        patch.setattr(holder_module, "IDLE_SECONDS", 0.05)
        lane = await lane_of(reader, holder)
        with pytest.raises(LinkLostError):
            await asyncio.wait_for(lane.link.greeting(OPENING_BYTES), 10)
    await lane_of(reader, holder)


async def test_no_more_readers_are_served_than_may_be(
    holder: Node, reader: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holder_module, "MAX_READERS", 1)
    await lane_of(reader, holder)
    late = node("late")
    assert await late.connector.fetch(holder.source, blocks(1), timeout=10) == (FetchOutcome.FAILED,)
    assert holder.first_stats.peers_refused == 1
    await late.connector.close()
    await lane_of(reader, holder)
