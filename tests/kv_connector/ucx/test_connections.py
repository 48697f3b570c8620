"""The connections of a reader over UCX: they are kept while they are of use, and no longer; what comes over one says
nothing of what comes over another."""

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import pytest

from kv_connector.base import FetchOutcome
from kv_connector.header import BlockHeader
from kv_connector.ucx.connector import UcxConnector
from kv_connector.ucx.protocol import MAX_ASK_BLOCKS, Entry, Status
from tests.kv_connector.backends import Node, blocks, write_and_publish
from tests.kv_connector.ucx.peers import peers_of, ucx_node

FETCHED, FAILED = FetchOutcome.FETCHED, FetchOutcome.FAILED
NUM_BLOCKS = 200  # more than one connection is asked for


@pytest.fixture
async def reader() -> AsyncIterator[Node]:
    made = ucx_node("reader", num_blocks=NUM_BLOCKS)
    yield made
    await made.connector.close()


async def test_a_connection_that_is_lost_while_another_is_not_is_replaced(reader: Node) -> None:
    """The holder drops one that is used for large fetches only when there was none for long."""
    holder = ucx_node("holder", num_blocks=NUM_BLOCKS)
    await write_and_publish(holder, blocks(NUM_BLOCKS))
    assert set(await reader.connector.fetch(holder.source, blocks(NUM_BLOCKS), timeout=10)) == {FETCHED}
    [peer] = peers_of(reader)
    lanes = list(peer._idle)
    assert len(lanes) == 2 and isinstance(holder.connector, UcxConnector)
    next(iter(holder.connector._require().holder._tasks)).cancel()
    async with asyncio.timeout(10):
        while all(lane.link.alive for lane in lanes):
            await asyncio.sleep(0)
    [lost] = (lane.link for lane in lanes if not lane.link.alive)
    assert set(await reader.connector.fetch(holder.source, blocks(NUM_BLOCKS), timeout=10)) == {FETCHED}
    assert peers_of(reader) == [peer] and len(peer._idle) == 2
    assert lost._endpoint is None, "it was closed"
    await holder.connector.close()


async def test_a_part_of_a_fetch_that_fails_says_nothing_of_the_next_one(
    reader: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = ucx_node("holder", num_blocks=NUM_BLOCKS)
    await write_and_publish(holder, blocks(NUM_BLOCKS))
    assert isinstance(holder.connector, UcxConnector)
    side = holder.connector._require().holder
    conclude = side._conclude

    def deny_the_first_part(chosen: tuple[int, BlockHeader] | None) -> Entry:
        assert chosen is not None
        return conclude(chosen) if chosen[0] >= MAX_ASK_BLOCKS else Entry(cast(Status, 99))

    monkeypatch.setattr(side, "_conclude", deny_the_first_part)
    result = await reader.connector.fetch(holder.source, blocks(NUM_BLOCKS), timeout=10)
    assert result == (FAILED,) * MAX_ASK_BLOCKS + (FETCHED,) * (NUM_BLOCKS - MAX_ASK_BLOCKS)
    await holder.connector.close()


async def test_a_fetch_that_is_cancelled_while_its_blocks_come_costs_no_connection(reader: Node) -> None:
    """ucxx never frees all of a receive that was broken off."""
    holder = ucx_node("holder", num_blocks=NUM_BLOCKS)
    await write_and_publish(holder, blocks(NUM_BLOCKS))
    assert set(await reader.connector.fetch(holder.source, blocks(NUM_BLOCKS), timeout=10)) == {FETCHED}
    [peer] = peers_of(reader)
    lanes = list(peer._idle)
    fetch = asyncio.create_task(reader.connector.fetch(holder.source, blocks(NUM_BLOCKS), timeout=10))
    async with asyncio.timeout(10):
        while not all(lane.link._posted for lane in lanes):
            await asyncio.sleep(0)
    fetch.cancel()
    await asyncio.wait([fetch], timeout=10)
    assert fetch.cancelled() and {id(lane) for lane in peer._idle} == {id(lane) for lane in lanes}
    assert not any(lane.link._posted for lane in lanes), "nothing arrives any more"
    assert set(await reader.connector.fetch(holder.source, blocks(NUM_BLOCKS), timeout=10)) == {FETCHED}
    assert all(lane.link.alive for lane in lanes)
    await holder.connector.close()


async def test_a_fetch_without_time_left_costs_no_connection(reader: Node) -> None:
    holder = ucx_node("holder", num_blocks=1)
    await write_and_publish(holder, blocks(1))
    assert await reader.connector.fetch(holder.source, blocks(1), timeout=10) == (FETCHED,)
    [peer] = peers_of(reader)
    [lane] = peer._idle
    assert await reader.connector.fetch(holder.source, blocks(1), timeout=0.0) == (FAILED,)
    assert peer._idle == [lane] and lane.link.alive
    await holder.connector.close()


async def test_peers_without_a_connection_are_closed(reader: Node) -> None:
    for turn in range(3):
        holder = ucx_node(f"holder-{turn}", num_blocks=2)
        await write_and_publish(holder, blocks(2))
        assert set(await reader.connector.fetch(holder.source, blocks(2), timeout=10)) == {FETCHED}
        await holder.connector.close()
        assert set(await reader.connector.fetch(holder.source, blocks(2), timeout=10)) == {FAILED}
    assert len(peers_of(reader)) == 1
    assert isinstance(reader.connector, UcxConnector)
    async with asyncio.timeout(10):
        while reader.connector._require().leaving:
            await asyncio.sleep(0)


async def test_a_peer_that_is_being_reached_is_not_taken_for_one_without_a_connection(reader: Node) -> None:
    holders = [ucx_node(f"holder-{index}", num_blocks=1) for index in range(2)]
    await asyncio.gather(*(reader.connector.fetch(holder.source, blocks(1), timeout=10) for holder in holders))
    assert len(peers_of(reader)) == 2
    for holder in holders:
        await holder.connector.close()
