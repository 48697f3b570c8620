"""A retraction wins over whatever is under way: a publication, and a copy by a peer."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import pytest

from kv_connector.base import FetchOutcome
from kv_connector.header import BlockHeader
from kv_connector.in_process import InProcessConnector, InProcessHub
from kv_connector.pool import LocalPool, Rows, copy_payload
from kv_connector.settings import UcxSettings
from kv_connector.shared_pool import SharedPool
from kv_connector.ucx.connector import UcxConnector
from kvrelay.core.kv.named_block import NamedBlock
from tests.kv_connector.backends import CLUSTER_SECRET, EPOCH, LAYOUT, Node, blocks, write_and_publish

FETCHED, MISSING, REFUSED, FAILED = FetchOutcome


class SlowlyDigested(LocalPool):
    """A pool whose blocks are described when `gate` is open, with the content that they had before."""

    gate: asyncio.Event

    async def describe_all(self, blocks: Sequence[NamedBlock], epoch: int) -> list[BlockHeader]:
        headers = await super().describe_all(blocks, epoch)
        await self.gate.wait()
        return headers


Shared: TypeAlias = SharedPool[SlowlyDigested]


@pytest.fixture
def shared() -> Iterator[Shared]:
    pool = SlowlyDigested.anonymous(LAYOUT, 4)
    assert isinstance(pool, SlowlyDigested)
    pool.gate = asyncio.Event()
    yield SharedPool(pool, EPOCH)
    pool.release()


async def test_a_block_that_is_retracted_while_it_is_digested_is_not_published(shared: Shared) -> None:
    publishing = asyncio.create_task(shared.publish(blocks(2)))
    await asyncio.sleep(0)
    shared.remove([0])
    shared.pool.gate.set()
    assert await publishing == 1
    assert [len(shared.find(block.block_hash)) for block in blocks(2)] == [0, 1]
    assert await shared.publish(blocks(2)) == 1


async def test_of_two_publications_of_a_block_one_counts(shared: Shared) -> None:
    publications = [asyncio.create_task(shared.publish(blocks(2))) for _ in range(2)]
    await asyncio.sleep(0)
    shared.pool.gate.set()
    assert await asyncio.gather(*publications) == [2, 0]


async def test_a_block_that_has_more_tokens_or_another_name_takes_the_place_of_what_it_was(shared: Shared) -> None:
    shared.pool.gate.set()
    [partial] = blocks(1, tail=5)
    for block in (partial, replace(partial, num_tokens=16), replace(partial, block_hash=blocks(2)[1].block_hash)):
        assert await shared.publish([block]) == 1
        [(_, header)] = shared.find(block.block_hash)
        assert (header.num_tokens, len(shared.ids_by_name)) == (block.num_tokens, 1), "and nothing else is visible"


class Guarded(SharedPool[LocalPool]):
    """A pool whose names are used under its lock only."""

    def __getattribute__(self, name: str) -> Any:
        assert name != "ids_by_name" or self.lock.locked()
        return super().__getattribute__(name)


async def test_names_are_looked_up_and_changed_only_under_the_lock() -> None:
    """The engine retracts from its own thread, at any moment."""
    guarded = Guarded(LocalPool.anonymous(LAYOUT, 4), EPOCH)
    [block] = blocks(1)
    assert await guarded.publish([block]) == len(guarded.find(block.block_hash)) == 1
    guarded.remove([block.block_id])
    assert not guarded.find(block.block_hash)
    guarded.pool.release()


async def test_a_header_is_another_one_after_a_retraction_even_if_it_is_equal(shared: Shared) -> None:
    shared.pool.gate.set()
    await shared.publish(blocks(1))
    [(block_id, header)] = shared.find(blocks(1)[0].block_hash)
    assert shared.shows(block_id, header)
    shared.remove([block_id])
    assert not shared.shows(block_id, header) and not shared.ids_by_name, "nothing is kept of its name"
    await shared.publish(blocks(1))
    assert shared.find(blocks(1)[0].block_hash) == [(block_id, header)] and not shared.shows(block_id, header)


async def test_a_block_that_changes_while_a_node_of_the_process_copies_it_is_missing() -> None:
    def copy(destination: Rows, source: Rows) -> bytes:
        if np.shares_memory(source, np.frombuffer(owner.row(1), np.uint8)):
            owner.connector.retract([1])
            owner.row(1)[:] = bytes(LAYOUT.block_bytes)
        return copy_payload(destination, source)

    hub = InProcessHub()
    owner = Node(InProcessConnector(hub), "owner", 4, LAYOUT, EPOCH)
    peer = Node(InProcessConnector(hub, copy=copy), "peer", 4, LAYOUT, EPOCH)
    await write_and_publish(owner, blocks(3))
    result = await peer.connector.fetch(owner.source, blocks(3), timeout=10)
    assert result == (FETCHED, MISSING, FETCHED)
    for node in (owner, peer):
        await node.connector.close()


@pytest.mark.parametrize("is_posted", [False, True])  # UCX has been given it to send
async def test_a_block_that_is_retracted_while_ucx_sends_it_is_missing(
    monkeypatch: pytest.MonkeyPatch, is_posted: bool
) -> None:
    owner, peer = (Node(UcxConnector(UcxSettings(CLUSTER_SECRET)), name, 4, LAYOUT, EPOCH) for name in ("a", "b"))
    await write_and_publish(owner, blocks(3))
    assert isinstance(owner.connector, UcxConnector)
    pool = owner.connector._require().shared.pool
    payload = pool.payload

    def retracted_meanwhile(block_id: int) -> object:
        if block_id == 1 and is_posted:
            asyncio.get_running_loop().call_soon(owner.connector.retract, [1])
        elif block_id == 1:
            owner.connector.retract([1])
        return payload(block_id)

    monkeypatch.setattr(pool, "payload", retracted_meanwhile)
    result = await peer.connector.fetch(owner.source, blocks(3), timeout=10)
    assert result == (FETCHED, MISSING, FETCHED)
    for node in (owner, peer):
        await node.connector.close()
