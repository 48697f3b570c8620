"""What a holder of UCX allows its readers: how many may be strangers, what they may ask, and how long they may take;
and what becomes of blocks for which it gives an unknown answer."""

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import cast

import numpy as np
import pytest

from kv_connector.base import FetchOutcome
from kv_connector.geometry import Geometry
from kv_connector.header import BlockHeader
from kv_connector.payloads import Payloads
from kv_connector.shared_pool import SharedPool
from kv_connector.ucx import holder as holder_module
from kv_connector.ucx.auth import Session, check_secret, new_nonce
from kv_connector.ucx.connector import UcxConnector
from kv_connector.ucx.holder import HANDSHAKE_SECONDS, MAX_STRANGERS, Holder
from kv_connector.ucx.protocol import (
    ASK_POSITION,
    ENTRY_BYTES,
    OPENING_BYTES,
    REPLY_POSITION,
    WELCOME_BYTES,
    Entry,
    Status,
    decode_opening,
    decode_reply,
    encode_ask,
    encode_opening,
    encode_proof,
)
from kv_connector.ucx.reader import Lane
from kv_connector.ucx.transport import Link, LinkLostError, Transport
from kvrelay.core.kv.block_hash import BlockHash
from tests.kv_connector.backends import CLUSTER_SECRET, OTHER_LAYOUT, Node, blocks, write_and_publish
from tests.kv_connector.ucx.peers import ucx_node
from tests.kv_connector.ucx.stubborn_request import StubbornRequest

FETCHED = FetchOutcome.FETCHED


@pytest.fixture
async def holder() -> AsyncIterator[Node]:
    """A holder that takes nothing its readers do for an error of its own, of which the loop would be told."""
    made, errors = ucx_node("holder"), list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    await write_and_publish(made, blocks(4))
    yield made
    await made.connector.close()
    gc.collect()  # what a task has raised is told of when it is collected
    assert not errors


@pytest.fixture
async def reader() -> AsyncIterator[Node]:
    made = ucx_node("reader")
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


async def test_a_stranger_that_says_nothing_is_dropped(holder: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take the place of others for ever."""
    monkeypatch.setattr(holder_module, "HANDSHAKE_SECONDS", 0.05)
    transport = Transport("")
    host, _, port = holder.source.endpoint.rpartition(":")
    link = transport.connect(host, int(port))
    with pytest.raises(LinkLostError):
        await asyncio.wait_for(link.greeting(OPENING_BYTES), 10)
    assert (holder.first_stats.peers_refused, side(holder)._strangers) == (1, 0)
    await link.close()
    transport.close()


async def test_a_reader_that_comes_while_the_holder_closes_is_turned_away(holder: Node) -> None:
    """UCX may have accepted it just before. It would read from a pool that is given up."""
    closed = side(holder)
    await holder.connector.close()
    transport = Transport("")
    listener, port = transport.listen(closed._admit)
    link = transport.connect("127.0.0.1", port)
    link.greet(encode_opening(new_nonce()))
    with pytest.raises(LinkLostError):
        await asyncio.wait_for(link.greeting(OPENING_BYTES), 10)
    assert not closed._tasks
    del listener
    await link.close()
    transport.close()


async def test_a_reader_that_comes_just_before_the_holder_closes_is_dropped(holder: Node) -> None:
    """Nothing has been done for it yet. It would wait for as long as a handshake may take, on a socket that stays."""
    transport = Transport("")
    host, _, port = holder.source.endpoint.rpartition(":")
    link = transport.connect(host, int(port))
    closing = side(holder)
    async with asyncio.timeout(HANDSHAKE_SECONDS):
        while not closing._tasks:
            await asyncio.sleep(0)
    await closing.close()
    with pytest.raises(LinkLostError):
        await asyncio.wait_for(link.greeting(OPENING_BYTES), HANDSHAKE_SECONDS / 2)
    await link.close()
    transport.close()


async def test_a_holder_closes_once_ucx_lets_go_of_what_it_was_sending(holder: Node) -> None:
    """The pool is given up next."""
    links: list[Link] = []
    closing, stubborn, transport = side(holder), StubbornRequest(), Transport("")

    def admit(link: Link) -> None:
        links.append(link)
        closing._admit(link)

    listener, port = transport.listen(admit)
    reader = transport.connect("127.0.0.1", port)
    reader.greet(encode_opening(new_nonce()))
    await asyncio.wait_for(reader.greeting(OPENING_BYTES), HANDSHAKE_SECONDS)
    links[0]._posted.append((stubborn, None, None))
    closed = asyncio.create_task(closing.close())
    for _ in range(20):
        await asyncio.sleep(0.001)
        assert not closed.done()
    stubborn.completed = True
    await asyncio.wait_for(closed, 10)
    del listener
    await reader.close()
    transport.close()


async def test_a_reader_with_another_layout_that_stays_is_dropped(holder: Node) -> None:
    transport = Transport("")
    host, _, port = holder.source.endpoint.rpartition(":")
    link = transport.connect(host, int(port))
    nonce, geometry = new_nonce(), Geometry.of(OTHER_LAYOUT)
    link.greet(encode_opening(nonce))
    session = Session(check_secret(CLUSTER_SECRET), nonce, decode_opening(await link.greeting(OPENING_BYTES)))
    link.greet(encode_proof(geometry, session.reader_proof(geometry)))
    await link.greeting(WELCOME_BYTES)
    link.greet(bytes(1))
    with pytest.raises(LinkLostError):
        await asyncio.wait_for(link.greeting(OPENING_BYTES), 10)
    assert holder.first_stats.peers_refused == 1
    await link.close()
    transport.close()


@pytest.mark.parametrize("count", [0, 0xFFFFFFFF])
async def test_an_ask_for_too_many_blocks_or_for_none_ends_the_connection(
    holder: Node, reader: Node, count: int
) -> None:
    lane = await lane_of(reader, holder)
    lane.link.send(np.frombuffer(count.to_bytes(4, "little"), np.uint8), lane.tag + ASK_POSITION)
    with pytest.raises(LinkLostError):
        await asyncio.wait_for(lane.link.greeting(OPENING_BYTES), 10)
    assert holder.first_stats.peers_refused == 1
    await lane_of(reader, holder)


async def test_a_block_that_is_retracted_while_it_is_sent_is_reported_as_that(
    holder: Node, reader: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise what arrives would be taken for damaged."""
    lane = await lane_of(reader, holder)
    found, find = asyncio.Event(), SharedPool.find

    def find_and_tell(shared: SharedPool[Payloads], name: BlockHash) -> list[tuple[int, BlockHeader]]:
        found.set()
        return find(shared, name)

    monkeypatch.setattr(SharedPool, "find", find_and_tell)
    [block] = blocks(1)
    lane.link.send(np.frombuffer(encode_ask([block.block_hash]), np.uint8), lane.tag + ASK_POSITION)
    await asyncio.wait_for(found.wait(), 10)
    holder.connector.retract([block.block_id])
    reply = np.zeros(ENTRY_BYTES, np.uint8)
    lane.link.receive(reader.row(0), lane.tag)  # it has waited for this
    lane.link.receive(reply, lane.tag + REPLY_POSITION)
    await asyncio.wait_for(lane.link.wait(), 10)
    assert decode_reply(reply.tobytes()) == [Entry(Status.RETRACTED)]


async def test_a_reply_that_a_reader_does_not_understand_fails_its_blocks(
    holder: Node, reader: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(side(holder), "_conclude", lambda chosen: Entry(cast(Status, 99)))
        assert await reader.connector.fetch(holder.source, blocks(2), timeout=10) == (FetchOutcome.FAILED,) * 2
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
    late = ucx_node("late")
    fetch = late.connector.fetch(holder.source, blocks(1), timeout=60)
    assert await asyncio.wait_for(fetch, HANDSHAKE_SECONDS / 2) == (FetchOutcome.FAILED,), "at once"
    assert holder.first_stats.peers_refused == 1
    await late.connector.close()
    await lane_of(reader, holder)
