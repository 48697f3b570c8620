"""Pools on devices that connectors reach directly: the order of the device's work, dead and unreachable peers, and who
understands whom. What every connector promises is in `test_contract.py`."""

import asyncio
import signal
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kv_connector.base import FetchOutcome
from kv_connector.device import cuda_handles
from kv_connector.device.cuda_ipc import CudaIpcConnector
from kv_connector.device.pool import DevicePool
from kv_connector.header import Mismatch
from kv_connector.segments.segment import MAX_HANDLE_BYTES, OwnedSegment, PeerSegment, SegmentRemovedError
from kv_connector.segments.shared_memory import SharedMemoryConnector
from kv_connector.settings import SharedMemorySettings, UcxSettings
from kv_connector.ucx.connector import UcxConnector
from kvrelay.core.errors import ConfigurationError, KVError
from kvrelay.core.kv.source import KVSource
from tests.kv_connector.backends import (
    CLUSTER_SECRET,
    EPOCH,
    LAYOUT,
    DirectHarness,
    DirectNode,
    Node,
    blocks,
    content,
    moved,
    write_and_publish,
)
from tests.kv_connector.device.direct_device import DirectDevice
from tests.kv_connector.open_files import open_files
from tests.kv_connector.owner_process import StartOwner

FETCHED, MISSING, REFUSED, FAILED = FetchOutcome
BOTH_WAYS = pytest.mark.parametrize("names", ["cuda_ipc", "ucx"])


def direct(names: str, node_id: str = "node", directory: str | None = None) -> DirectNode:
    return DirectNode(DirectHarness(names, directory).connector(), node_id, 16, LAYOUT, EPOCH)


def is_empty(directory: Path) -> bool:
    return not list(directory.iterdir())


class Pair:
    """A holder that has published 4 blocks, and a reader."""

    def __init__(self, names: str) -> None:
        self.owner, self.peer = direct(names, "owner"), direct(names, "peer")

    async def fetch(self, count: int = 4, *, timeout: float = 10.0) -> tuple[FetchOutcome, ...]:
        return await self.peer.connector.fetch(self.owner.source, blocks(count), timeout=timeout)


@pytest.fixture
async def pair(names: str) -> AsyncIterator[Pair]:
    made = Pair(names)
    await write_and_publish(made.owner, blocks(4))
    yield made
    for node in (made.owner, made.peer):
        node.device.gate.set()
        await node.close()


@BOTH_WAYS
async def test_blocks_are_verified_where_they_lie_before_a_fetch_ends(pair: Pair) -> None:
    pair.peer.device.gate.clear()
    fetch = asyncio.create_task(pair.fetch())
    await asyncio.to_thread(pair.peer.device.waiting.wait, 10)
    for _ in range(3):
        await asyncio.sleep(0)
    assert not fetch.done(), "the device still works"
    pair.peer.device.gate.set()
    assert await fetch == (FETCHED,) * 4
    assert pair.peer.device.num_digested == 4
    assert pair.peer.row(3) == pair.owner.row(3)


@BOTH_WAYS
async def test_a_cancelled_fetch_waits_for_the_device(pair: Pair) -> None:
    pair.peer.device.gate.clear()
    fetch = asyncio.create_task(pair.fetch())
    await asyncio.to_thread(pair.peer.device.waiting.wait, 10)
    for _ in range(3):
        fetch.cancel()
        await asyncio.wait([fetch], timeout=0.001)
        assert not fetch.done(), "the device still works"
    pair.peer.device.gate.set()
    await asyncio.wait([fetch], timeout=10)
    assert fetch.cancelled()
    assert await pair.fetch() == (FETCHED,) * 4


@pytest.mark.parametrize("names", ["cuda_ipc"])
async def test_a_block_that_changes_while_it_is_copied_is_missing(pair: Pair) -> None:
    pair.peer.device.gate.clear()
    fetch = asyncio.create_task(pair.fetch())
    await asyncio.to_thread(pair.peer.device.waiting.wait, 10)
    pair.owner.connector.retract([2])
    pair.owner.row(2)[:] = bytes(LAYOUT.block_bytes)
    pair.peer.device.gate.set()
    assert await fetch == (FETCHED, FETCHED, MISSING, FETCHED)
    assert pair.peer.first_stats.refused[Mismatch.DIGEST] == 0


async def test_a_pool_whose_handle_somebody_removed_is_lost(tmp_path: Path) -> None:
    node = direct("cuda_ipc", directory=str(tmp_path))
    await write_and_publish(node, blocks(1))
    segment = tmp_path / node.source.endpoint
    segment.unlink()
    with pytest.raises(SegmentRemovedError):
        await node.connector.publish(blocks(1))
    await node.close()


@BOTH_WAYS
async def test_a_device_that_fails_publishes_nothing_and_fetches_nothing(names: str, pair: Pair) -> None:
    assert await pair.fetch(1) == (FETCHED,)
    pair.owner.device.broken = pair.peer.device.broken = True
    with pytest.raises(KVError, match="the device is gone"):
        await pair.owner.connector.publish(moved(blocks(2, tag="new"), 7))
    if names == "ucx":  # has transferred before the device is asked for digests
        assert await pair.fetch() == (FAILED,) * 4
    else:
        with pytest.raises(KVError, match="the device is gone"):
            await pair.fetch()
    pair.owner.device.broken = pair.peer.device.broken = False
    assert await pair.fetch() == (FETCHED,) * 4
    await pair.owner.connector.publish(moved(blocks(2, tag="new"), 7))


@pytest.mark.parametrize("names", ["cuda_ipc"])
async def test_blocks_that_are_digested_while_the_connector_closes_are_not_published(pair: Pair) -> None:
    """It is not told any more which of them were retracted, and may have given up the segment."""
    owner = pair.owner
    owner.device.waiting.clear()
    owner.device.gate.clear()
    publishing = asyncio.create_task(owner.connector.publish(moved(blocks(2, tag="new"), 7)))
    await asyncio.to_thread(owner.device.waiting.wait, 10)
    closing = asyncio.create_task(owner.connector.close())
    await asyncio.sleep(0)
    owner.device.gate.set()
    with pytest.raises(KVError, match="closed"):
        await publishing
    await closing
    assert owner.first_stats.blocks_published == 4


@pytest.mark.parametrize("names", ["cuda_ipc"])
async def test_closing_lets_go_of_the_memory_of_peers_after_the_copy_under_way(pair: Pair) -> None:
    peer = pair.peer
    peer.device.gate.clear()
    fetch = asyncio.create_task(pair.fetch())
    await asyncio.to_thread(peer.device.waiting.wait, 10)
    closing = asyncio.create_task(peer.connector.close())
    for _ in range(3):
        await asyncio.sleep(0)
    assert not closing.done(), "the device still works"
    peer.device.gate.set()
    await closing
    assert [mapped.closed for mapped in peer.device.opened] == [True]
    with pytest.raises(KVError, match="closed during a fetch"):
        await fetch


@pytest.mark.parametrize("names", ["cuda_ipc", "cuda_ipc,ucx"])
async def test_a_pool_that_can_not_be_mapped_is_fetched_from_over_ucx_or_not_at_all(names: str, pair: Pair) -> None:
    pair.peer.device.unmappable = True
    assert set(await pair.fetch()) == {FETCHED if "ucx" in names else FAILED}
    assert pair.peer.device.num_copied == 0
    assert pair.peer.first_stats.failed == 4


@BOTH_WAYS
@pytest.mark.parametrize("killed", [True, False])
async def test_another_process_serves_until_it_is_gone(
    names: str, killed: bool, tmp_path: Path, start_owner: StartOwner
) -> None:
    directory = str(tmp_path)
    child, peer = start_owner("device.owner", names, directory), direct(names, "peer", directory)
    before = open_files()
    result = await peer.connector.fetch(child.source, blocks(16), timeout=10)
    assert set(result) == {FETCHED}
    for block in blocks(16):
        assert peer.row(block.block_id) == content(block.block_hash, LAYOUT.block_bytes)
    if killed:
        child.kill()
    else:
        child.end()
    result = await peer.connector.fetch(child.source, blocks(16), timeout=10)
    assert set(result) == {FAILED}
    assert all(mapped.closed for mapped in peer.device.opened), "its memory is let go of"
    assert not any(path.startswith(directory) for path in open_files() - before)
    again = direct(names, "again", directory)  # sweeps what the dead has left
    for node in (peer, again):
        await node.close()
    assert is_empty(tmp_path)


async def test_a_holder_that_stops_leaves_the_device_quiet(tmp_path: Path, start_owner: StartOwner) -> None:
    child, peer = start_owner("device.owner", "ucx", str(tmp_path)), direct("ucx")
    assert set(await peer.connector.fetch(child.source, blocks(1), timeout=10)) == {FETCHED}
    assert peer.device.num_quiesced == 0
    child.signal(signal.SIGSTOP)
    result = await peer.connector.fetch(child.source, blocks(4), timeout=0.2)
    assert set(result) == {FAILED} and peer.device.num_quiesced == 1
    child.kill()
    await peer.close()


async def test_over_ucx_a_device_and_a_host_exchange_blocks() -> None:
    device = direct("ucx", "device")
    host = Node(UcxConnector(UcxSettings(CLUSTER_SECRET)), "host", 16, LAYOUT, EPOCH)
    for owner, peer in ((device, host), (host, device)):
        sent = blocks(5, tag=owner.source.node_id, tail=3)
        await write_and_publish(owner, sent[1:])
        result = await peer.connector.fetch(owner.source, sent, timeout=10)
        assert result == (MISSING, *(FETCHED,) * 4)
        assert peer.row(4) == owner.row(4)
    await host.connector.close()
    await device.close()


async def test_pools_on_the_host_and_on_a_device_are_not_taken_for_each_other(tmp_path: Path) -> None:
    settings = SharedMemorySettings(str(tmp_path))
    device = DirectNode(CudaIpcConnector(settings), "device", 8, LAYOUT, EPOCH)
    host = Node(SharedMemoryConnector(settings), "host", 8, LAYOUT, EPOCH)
    for owner, peer in ((device, host), (host, device)):
        await write_and_publish(owner, blocks(2))
        outcomes = await peer.connector.fetch(owner.source, blocks(2), timeout=10)
        assert outcomes == (FAILED,) * 2
    await host.connector.close()
    await device.close()


async def test_a_wrong_handle_fails_the_fetch(tmp_path: Path) -> None:
    good = OwnedSegment(tmp_path, "good", EPOCH, LAYOUT, 8, device_handle=b"no such thing")
    peer = DirectNode(CudaIpcConnector(SharedMemorySettings(str(tmp_path))), "peer", 8, LAYOUT, EPOCH)
    source = KVSource("good", EPOCH, good.path.name)
    assert await peer.connector.fetch(source, blocks(1), timeout=10) == (FAILED,)
    with good.path.open("r+b") as file:
        file.seek(good.preamble.pool_offset)
        file.write((MAX_HANDLE_BYTES + 1).to_bytes(4, "little"))
    with pytest.raises(KVError, match="a device handle of 4093 bytes"):
        PeerSegment(tmp_path, good.path.name, on_device=True)
    assert await peer.connector.fetch(source, blocks(1), timeout=10) == (FAILED,)
    good.close()
    good.mapping.close()
    await peer.close()


async def test_closing_tiers_ends_the_thread_of_the_device() -> None:
    node = direct("cuda_ipc,ucx")
    await write_and_publish(node, blocks(4))
    await node.connector.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("kv-")]


class OnGpu(DirectDevice):
    kind = "cuda"


async def test_ucx_without_cuda_refuses_device_memory() -> None:
    """It would use the addresses as if they were the host's."""
    pool = DevicePool(OnGpu(4, LAYOUT.block_bytes), LAYOUT)
    connector = UcxConnector(UcxSettings(CLUSTER_SECRET))
    before = open_files()
    with pytest.raises(ConfigurationError, match="does not move cuda memory"):
        connector.serve(pool, node_id="node", epoch=EPOCH)
    assert open_files() == before
    await connector.close()
    pool.stop()


async def test_ucx_takes_no_memory_of_the_device_for_what_it_moves() -> None:
    """ucxx would have it do so. A reader reads from device to device."""
    node = direct("ucx")
    assert isinstance(node.connector, UcxConnector)
    config = node.connector._require().transport._context.config
    assert (config["RNDV_SCHEME"], config["RNDV_FRAG_MEM_TYPES"]) == ("get_zcopy", "host")
    await node.close()


async def test_a_missing_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--shared-memory-dir: .* is not a directory"):
        DirectNode(CudaIpcConnector(SharedMemorySettings(f"{tmp_path}/absent")), "node", 4, LAYOUT, EPOCH)


def test_cuda_without_a_gpu_is_an_error_and_not_a_crash() -> None:
    for call in (
        lambda: cuda_handles.select_device(0),
        lambda: cuda_handles.allocation_at(1 << 40),
        lambda: cuda_handles.export_handle(1 << 40),
        lambda: cuda_handles.open_handle(bytes(cuda_handles.HANDLE_BYTES)),
        lambda: cuda_handles.close_handle(1 << 40),
        lambda: cuda_handles.copy(1 << 40, 1 << 41, 64, 0),
    ):
        with pytest.raises(KVError, match=r"cuda|cuMem"):
            call()


def test_a_cuda_handle_keeps_its_bytes() -> None:
    content = bytes(range(cuda_handles.HANDLE_BYTES))
    assert cuda_handles.handle_bytes(cuda_handles.handle_from(content)) == content
