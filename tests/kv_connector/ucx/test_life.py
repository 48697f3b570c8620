"""What a UCX connector needs to start, and what it leaves when it is closed."""

import asyncio
import os
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from kv_connector.base import FetchOutcome
from kv_connector.settings import LOOPBACK_DEVICE, UcxSettings
from kv_connector.ucx.connector import UcxConnector
from kv_connector.ucx.transport import Link
from kvrelay.core.errors import ConfigurationError
from tests.kv_connector.backends import CLUSTER_SECRET, Node, blocks, write_and_publish
from tests.kv_connector.open_files import open_files
from tests.kv_connector.ucx.peers import ucx_node
from tests.kv_connector.ucx.stubborn_request import StubbornRequest


@pytest.mark.parametrize("net_devices", ["", LOOPBACK_DEVICE])
async def test_closing_leaves_no_task_and_no_socket(net_devices: str) -> None:
    before = open_files()
    for _ in range(3):
        owner, reader = (ucx_node(name, net_devices=net_devices) for name in ("owner", "reader"))
        await write_and_publish(owner, blocks(4))
        assert set(await reader.connector.fetch(owner.source, blocks(4), timeout=10)) == {FetchOutcome.FETCHED}
        for each in (reader, owner, reader, owner):
            await each.connector.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}
    assert open_files() == before


async def test_a_node_on_loopback_is_reached_over_no_other_interface() -> None:
    """ucxx listens on every address."""
    before = listeners()
    node = ucx_node("local", net_devices=LOOPBACK_DEVICE)
    opened = listeners() - before
    assert int(node.source.endpoint.rpartition(":")[2]) in {port for port, _, _ in opened}
    assert all(address == "127.0.0.1" or device == LOOPBACK_DEVICE for _, address, device in opened)
    await node.connector.close()


def listeners() -> set[tuple[int, str, str]]:
    """Returns port, address and network interface of each socket on which this process listens for IPv4."""
    found = set()
    for descriptor in filter(Path.is_socket, Path("/proc/self/fd").iterdir()):
        with suppress(OSError), socket.socket(fileno=os.dup(int(descriptor.name))) as each:
            if each.family == socket.AF_INET and each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                address, port = each.getsockname()
                device = each.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16)
                found.add((port, address, device.rstrip(b"\0").decode()))
    return found


async def link_of(reader: Node, owner: Node) -> Link:
    """Returns the connection over which the reader has just fetched."""
    assert await reader.connector.fetch(owner.source, blocks(1), timeout=10) == (FetchOutcome.FETCHED,)
    assert isinstance(reader.connector, UcxConnector)
    peers = reader.connector._require().peers
    [lane] = peers[owner.source.endpoint]._idle
    return lane.link


async def test_the_pool_is_kept_until_ucx_gives_up_the_buffers_of_a_peer_that_is_gone() -> None:
    gone, owner, reader = ucx_node("gone"), ucx_node("owner"), ucx_node("reader")
    for each in (gone, owner):
        await write_and_publish(each, blocks(1))
    link = await link_of(reader, gone)
    stubborn = StubbornRequest()
    link._posted.append((stubborn, None, None))
    await gone.connector.close()
    async with asyncio.timeout(10):
        while link.alive:
            await asyncio.sleep(0)
    await link_of(reader, owner)  # no fetch waits for the peer that is gone
    closing = asyncio.create_task(reader.connector.close())
    for _ in range(100):
        await asyncio.sleep(0.001)
        assert not closing.done()
    assert len(reader.pool.memory)
    stubborn.completed = True
    await asyncio.wait_for(closing, 10)
    await owner.connector.close()


async def test_a_close_that_is_cancelled_again_and_again_leaves_nothing_either() -> None:
    """The pool may belong to another connector, which gives it up next."""
    before = open_files()
    owner, reader = ucx_node("owner"), ucx_node("reader")
    await write_and_publish(owner, blocks(1))
    stubborn = StubbornRequest()
    (await link_of(reader, owner))._posted.append((stubborn, None, None))
    fetch = asyncio.create_task(reader.connector.fetch(owner.source, blocks(1), timeout=60))
    await asyncio.sleep(0)
    closings = [asyncio.create_task(each.connector.close()) for each in (reader, owner)]
    for _ in range(10):
        await asyncio.sleep(0)
        for closing in closings:
            closing.cancel()
    assert not closings[0].done() and len(reader.pool.memory)
    stubborn.completed = True
    await asyncio.wait([*closings, fetch], timeout=10)
    assert [closing.cancelled() for closing in closings] == [True, True] and fetch.result() == (FetchOutcome.FAILED,)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert open_files() == before
    for each in (reader, owner):
        with pytest.raises(ValueError, match="released"):
            len(each.pool.memory)


async def test_an_owner_that_waits_for_ucx_to_be_closed_gives_no_blocks_away() -> None:
    """It does not learn any more which of them lose their content."""
    other, owner, reader = ucx_node("other"), ucx_node("owner"), ucx_node("reader")
    for each in (other, owner):
        await write_and_publish(each, blocks(1))
    await link_of(reader, owner)
    stubborn = StubbornRequest()
    (await link_of(owner, other))._posted.append((stubborn, None, None))
    fetch = asyncio.create_task(owner.connector.fetch(other.source, blocks(1), timeout=60))
    await asyncio.sleep(0)
    closing = asyncio.create_task(owner.connector.close())
    await asyncio.sleep(0)
    result = await reader.connector.fetch(owner.source, blocks(1), timeout=10)
    assert result == (FetchOutcome.MISSING,) and not closing.done()
    stubborn.completed = True
    await asyncio.wait_for(closing, 10)
    assert await fetch == (FetchOutcome.FAILED,)
    for each in (reader, other):
        await each.connector.close()


async def test_without_memory_for_the_pool_nothing_is_left() -> None:
    before = open_files()
    with pytest.raises(ConfigurationError, match="lower num_blocks"):
        ucx_node("large", num_blocks=1 << 40)
    assert open_files() == before


def test_without_a_secret_or_an_address_it_does_not_start() -> None:
    for secret in ("", "k" * 15):
        with pytest.raises(ConfigurationError, match=r"secret of at least 16 characters.*KVRELAY_CLUSTER_SECRET"):
            UcxConnector(UcxSettings(secret))
    UcxConnector(UcxSettings("k" * 16))
    for host in ("", "0.0.0.0", "::", "*", "fd00::3"):  # under which no other node reaches this one
        with pytest.raises(ConfigurationError, match="--ucx-host"):
            UcxConnector(UcxSettings(CLUSTER_SECRET, host=host))
    assert CLUSTER_SECRET not in repr(UcxSettings(CLUSTER_SECRET))
