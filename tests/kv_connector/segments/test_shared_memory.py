"""Shared memory between real processes, and what stays when one of them dies."""

import asyncio
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kv_connector.base import FetchOutcome
from kv_connector.pool import CopyRows, Rows, copy_rows
from kv_connector.segments import mapped_peers, shared_memory
from kv_connector.segments.mapped_peers import MappedPeer, MappedPeers
from kv_connector.segments.segment import SegmentRemovedError
from kv_connector.segments.shared_memory import SharedMemoryConnector
from kv_connector.settings import SharedMemorySettings
from kvrelay.core.errors import ConfigurationError, KVError
from kvrelay.core.kv.layout import KVLayout
from kvrelay.core.kv.source import KVSource
from kvrelay.node.transfers.block_copy import choose_copy
from tests.kv_connector.backends import EPOCH, LAYOUT, Node, blocks, content, write_and_publish
from tests.kv_connector.open_files import open_files
from tests.kv_connector.owner_process import StartOwner
from tests.manual_clock import ManualClock


def mappings() -> str:
    return Path("/proc/self/maps").read_text()


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def node(directory: Path, node_id: str = "peer", *, copy: CopyRows | None = None) -> Node:
    connector = SharedMemoryConnector(SharedMemorySettings(str(directory)), copy=copy or choose_copy())
    return Node(connector, node_id, 16, LAYOUT, 1)


def held_copy(copying: threading.Event, go_on: threading.Event) -> CopyRows:
    """Returns a copy that sets `copying` when it begins, and then waits for `go_on`."""

    def copy(target: Rows, target_rows: Sequence[int], source: Rows, source_rows: Sequence[int]) -> Sequence[bytes]:
        copying.set()
        go_on.wait(10)
        return copy_rows(target, target_rows, source, source_rows)

    return copy


@pytest.mark.parametrize("num_blocks", [1, 40])  # on the loop; on the worker's thread
async def test_few_and_many_blocks_are_published(tmp_path: Path, num_blocks: int) -> None:
    owner = Node(SharedMemoryConnector(SharedMemorySettings(str(tmp_path))), "owner", 40, LAYOUT, EPOCH)
    peer = Node(SharedMemoryConnector(SharedMemorySettings(str(tmp_path))), "peer", 40, LAYOUT, EPOCH)
    await write_and_publish(owner, blocks(num_blocks))
    assert owner.first_stats.blocks_published == num_blocks
    result = await peer.connector.fetch(owner.source, blocks(num_blocks), timeout=10)
    assert set(result) == {FetchOutcome.FETCHED}
    await owner.connector.close()
    await peer.connector.close()


@pytest.mark.parametrize("damaged", [0, 1])
async def test_a_block_arrives_if_one_slot_of_several_is_good(tmp_path: Path, damaged: int) -> None:
    owner, peer = node(tmp_path, "owner"), node(tmp_path)
    [block] = blocks(1)
    twice = [block, replace(block, block_id=1)]
    await write_and_publish(owner, twice)
    owner.row(damaged)[-1] ^= 1
    connector = peer.connector
    assert isinstance(connector, SharedMemoryConnector)
    reader, copied = connector._require().reader, []
    copy = reader._copy

    def watched(peer: MappedPeer, block_ids: Sequence[int], slots: Sequence[int]) -> Sequence[bytes]:
        copied.append(list(slots))
        return copy(peer, block_ids, slots)

    reader._copy = watched
    result = await connector.fetch(owner.source, [block], timeout=10)
    assert copied == [[0], [1]][: 2 - damaged]  # a device would be waited for, were there nothing to copy
    assert result == (FetchOutcome.FETCHED,)
    assert peer.row(block.block_id) == content(block.block_hash, LAYOUT.block_bytes)
    await owner.connector.close()
    await peer.connector.close()


@pytest.mark.parametrize("killed", [True, False])
async def test_another_process_serves_until_it_is_gone(tmp_path: Path, killed: bool, start_owner: StartOwner) -> None:
    owner = start_owner("segments.owner", str(tmp_path))
    source = owner.source
    peer = node(tmp_path)
    result = await peer.connector.fetch(source, blocks(16), timeout=10)
    assert set(result) == {FetchOutcome.FETCHED}
    for block in blocks(16):
        assert peer.row(block.block_id) == content(block.block_hash, LAYOUT.block_bytes)
    if killed:
        owner.kill()
    else:
        owner.end()
    result = await peer.connector.fetch(source, blocks(16), timeout=10)
    assert set(result) == {FetchOutcome.FAILED}
    assert source.endpoint not in mappings() and str(tmp_path / source.endpoint) not in open_files()
    assert (tmp_path / source.endpoint).exists() == killed
    other = node(tmp_path, "other")  # allocating sweeps the dead and spares the living
    assert files(tmp_path) == sorted([peer.source.endpoint, other.source.endpoint])
    await peer.connector.close()
    await other.connector.close()
    assert not files(tmp_path)


@pytest.fixture
def frequent_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_peers, "_CHECK_SECONDS", 0.01)


@pytest.mark.usefixtures("frequent_checks")
async def test_memory_of_a_dead_owner_is_given_back_without_another_fetch(
    tmp_path: Path, start_owner: StartOwner
) -> None:
    """Its successor may need the space before it can start, and an idle reader fetches nothing."""
    peer = node(tmp_path)
    for num_fetches in (2, 1):
        owner = start_owner("segments.owner", str(tmp_path))
        source = owner.source
        for _ in range(num_fetches):
            await peer.connector.fetch(source, blocks(16), timeout=10)
        assert source.endpoint in mappings()
        owner.kill()
        async with asyncio.timeout(10):
            while source.endpoint in mappings():
                await asyncio.sleep(0.01)
    owner = start_owner("segments.owner", str(tmp_path))
    source = owner.source
    result = await peer.connector.fetch(source, blocks(16), timeout=10)
    assert set(result) == {FetchOutcome.FETCHED}
    await peer.connector.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    owner.kill()


@pytest.mark.usefixtures("frequent_checks")
async def test_memory_of_a_dead_owner_is_given_back_after_a_fetch_that_was_cancelled(
    tmp_path: Path, start_owner: StartOwner
) -> None:
    copying, go_on = threading.Event(), threading.Event()
    owner = start_owner("segments.owner", str(tmp_path))
    source = owner.source
    peer = node(tmp_path, copy=held_copy(copying, go_on))
    fetch = asyncio.create_task(peer.connector.fetch(source, blocks(16), timeout=10))
    await asyncio.to_thread(copying.wait, 10)
    fetch.cancel()
    go_on.set()
    await asyncio.wait([fetch])
    assert fetch.cancelled() and source.endpoint in mappings()
    owner.kill()
    async with asyncio.timeout(10):
        while source.endpoint in mappings():
            await asyncio.sleep(0.01)
    await peer.connector.close()


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every block a part of its own, between two of which others run."""
    monkeypatch.setattr(shared_memory, "_SLICE_BYTES", 1)


@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize(("part", "num_parts"), [(1, 1), (2, 16)])
async def test_closing_during_a_fetch_raises(tmp_path: Path, part: int, num_parts: int) -> None:
    loop, reached, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    parts = iter(range(1, 17))

    def copy(target: Rows, target_rows: Sequence[int], source: Rows, source_rows: Sequence[int]) -> Sequence[bytes]:
        if next(parts) == part:
            loop.call_soon_threadsafe(reached.set)
            go_on.wait(10)
        return copy_rows(target, target_rows, source, source_rows)

    owner = node(tmp_path, "owner")
    peer = node(tmp_path, copy=copy)
    await write_and_publish(owner, blocks(16))
    fetch = asyncio.create_task(peer.connector.fetch(owner.source, blocks(num_parts), timeout=10))
    await reached.wait()
    closing = asyncio.create_task(peer.connector.close())
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(KVError, match="closed"):
        await fetch
    await closing
    assert asyncio.all_tasks() == {asyncio.current_task()}
    await owner.connector.close()


async def test_nothing_is_copied_when_mapping_the_peer_took_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, find = ManualClock(), MappedPeers.get

    def find_slowly(peers: MappedPeers[Any], source: KVSource) -> Any:
        clock.seconds += 1.0
        return find(peers, source)

    owner = node(tmp_path, "owner")
    connector = SharedMemoryConnector(SharedMemorySettings(str(tmp_path)), clock=clock)
    peer = Node(connector, "peer", 16, LAYOUT, 1)
    await write_and_publish(owner, blocks(3))
    monkeypatch.setattr(MappedPeers, "get", find_slowly)
    result = await peer.connector.fetch(owner.source, blocks(3), timeout=0.5)
    assert set(result) == {FetchOutcome.FAILED}
    await owner.connector.close()
    await peer.connector.close()


@pytest.mark.usefixtures("in_parts")
async def test_nothing_more_is_copied_when_the_time_is_over(tmp_path: Path) -> None:
    clock = ManualClock()

    def copy(target: Rows, target_rows: Sequence[int], source: Rows, source_rows: Sequence[int]) -> Sequence[bytes]:
        clock.seconds += 1.0
        return copy_rows(target, target_rows, source, source_rows)

    owner = node(tmp_path, "owner")
    connector = SharedMemoryConnector(SharedMemorySettings(str(tmp_path)), copy=copy, clock=clock)
    peer = Node(connector, "peer", 16, LAYOUT, 1)
    await write_and_publish(owner, blocks(3))
    result = await peer.connector.fetch(owner.source, blocks(3), timeout=1.5)
    assert result == (FetchOutcome.FETCHED, FetchOutcome.FETCHED, FetchOutcome.FAILED)
    await owner.connector.close()
    await peer.connector.close()


@pytest.mark.usefixtures("in_parts")
async def test_nothing_is_copied_after_a_fetch_was_cancelled_between_its_parts(tmp_path: Path) -> None:
    begun, go_on = ([threading.Event() for _ in range(16)] for _ in range(2))
    copied = iter(range(16))

    def copy(target: Rows, target_rows: Sequence[int], source: Rows, source_rows: Sequence[int]) -> Sequence[bytes]:
        number = next(copied)
        begun[number].set()
        go_on[number].wait(10)
        return copy_rows(target, target_rows, source, source_rows)

    owner = node(tmp_path, "owner")
    peer = node(tmp_path, copy=copy)
    await write_and_publish(owner, blocks(16))
    fetch = asyncio.create_task(peer.connector.fetch(owner.source, blocks(16), timeout=10))
    go_on[0].set()
    await asyncio.to_thread(begun[1].wait, 10)
    fetch.cancel()
    go_on[1].set()
    begun[2].wait(10)  # the thread has had this part since before, and begins it while the loop does nothing
    for _ in range(10):
        await asyncio.sleep(0)
        assert not fetch.done(), "it waits for the part under way"
    go_on[2].set()
    await asyncio.wait([fetch])
    assert fetch.cancelled()
    await peer.connector.close()
    assert next(copied) == 3 and asyncio.all_tasks() == {asyncio.current_task()}
    await owner.connector.close()


@pytest.mark.usefixtures("in_parts")
async def test_an_owner_that_dies_during_a_fetch_fails_the_rest_of_it(tmp_path: Path) -> None:
    """Another fetch notices first, and unmaps the segment."""
    copying, go_on = threading.Event(), threading.Event()
    owner = node(tmp_path, "owner")
    peer = node(tmp_path, copy=held_copy(copying, go_on))
    source = owner.source
    await write_and_publish(owner, blocks(3))
    fetches = [asyncio.create_task(peer.connector.fetch(source, blocks(count), timeout=10)) for count in (3, 1)]
    await asyncio.to_thread(copying.wait, 10)
    await owner.connector.close()
    go_on.set()
    outcomes = [await fetch for fetch in fetches]
    assert outcomes == [(FetchOutcome.FETCHED, FetchOutcome.FAILED, FetchOutcome.FAILED), (FetchOutcome.FAILED,)]
    await peer.connector.close()


async def test_the_segment_is_private_and_has_its_space(tmp_path: Path) -> None:
    owner = node(tmp_path, "a/../b")
    path = tmp_path / owner.source.endpoint
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_blocks * 512 >= len(owner.pool.memory)
    await owner.connector.close()


@pytest.mark.parametrize("num_blocks", [1, 40])  # on the loop; on the worker's thread
async def test_a_pool_whose_file_somebody_removed_is_lost(tmp_path: Path, num_blocks: int) -> None:
    """Only a restart of its node helps, so it is no failure that passes."""
    owner = Node(SharedMemoryConnector(SharedMemorySettings(str(tmp_path))), "owner", 40, LAYOUT, EPOCH)
    await write_and_publish(owner, blocks(num_blocks))
    segment = tmp_path / owner.source.endpoint
    segment.unlink()
    with pytest.raises(SegmentRemovedError, match=f"{segment}, from which peers copy KV, was removed") as lost:
        await owner.connector.publish(blocks(num_blocks))
    assert not isinstance(lost.value, KVError), "which would be taken for a failure that passes"
    await owner.connector.close()


async def test_too_large_a_pool_names_the_remedies(tmp_path: Path) -> None:
    connector = SharedMemoryConnector(SharedMemorySettings(str(tmp_path)))
    huge = KVLayout(num_kv_heads=64, num_layers=64, block_size=64, head_dim=256, dtype="float32")
    with pytest.raises(ConfigurationError, match=r"needs [\d.]+ GiB .* has [\d.]+ .iB free: use fewer.*--shm-size"):
        connector.allocate(huge, 1 << 20, node_id="huge", epoch=1)
    assert not files(tmp_path), "what it has created is gone"
    with pytest.raises(ConfigurationError, match="not a directory"):
        node(tmp_path / "absent")


async def test_endpoints_that_name_no_segment_fail_or_are_refused(tmp_path: Path) -> None:
    peer = node(tmp_path)
    before = open_files()
    name = "kvrelay-x-0000000000000001.kv"

    async def outcome(endpoint: str) -> FetchOutcome:
        return (await peer.connector.fetch(KVSource("x", 1, endpoint), blocks(1), timeout=10))[0]

    assert await outcome(name) is FetchOutcome.FAILED
    assert await outcome("../../etc/passwd") is FetchOutcome.FAILED
    (tmp_path / name).write_bytes(b"")
    assert await outcome(name) is FetchOutcome.FAILED
    (tmp_path / name).write_bytes(b"KVRELAY\0" + bytes(8192))
    assert await outcome(name) is FetchOutcome.FAILED
    (tmp_path / name).write_bytes((tmp_path / peer.source.endpoint).read_bytes()[:-1])
    assert await outcome(name) is FetchOutcome.FAILED, "it is cut short"
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    assert await outcome(name) is FetchOutcome.FAILED
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to(peer.source.endpoint)
    assert await outcome(name) is FetchOutcome.FAILED
    assert peer.first_stats.failed == 7
    assert open_files() == before
    await peer.connector.close()


async def test_a_segment_of_another_user_is_not_mapped_and_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    owner, reader = node(tmp_path, "owner"), node(tmp_path)
    await write_and_publish(owner, blocks(1))
    other_user = os.geteuid() + 1
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: other_user)
        for _ in range(3):
            result = await reader.connector.fetch(owner.source, blocks(1), timeout=10)
            assert result == (FetchOutcome.FAILED,)
    assert caplog.text.count("belongs to another user") == 1
    assert await reader.connector.fetch(owner.source, blocks(1), timeout=10) == (FetchOutcome.FETCHED,)
    await reader.connector.close()
    await owner.connector.close()


async def test_a_block_retracted_during_publish_is_not_published(tmp_path: Path) -> None:
    """The header of content that is gone must not appear, even when its digest was computed in time."""
    owner = node(tmp_path)
    connector = owner.connector
    assert isinstance(connector, SharedMemoryConnector)
    slots = connector._require().segment.slots
    described = [connector._require().pool.describe(block, EPOCH) for block in blocks(2)]
    absent = slots.absent(blocks(2))
    connector.retract([0])
    assert slots.fill(absent, described) == 1
    assert slots.absent(blocks(2)) == [(blocks(2)[0], 2)]
    assert slots.fill(slots.absent(blocks(2)), described[:1]) == 1
    assert not slots.absent(blocks(2))
    await connector.close()


async def test_memory_stays_while_a_view_is_alive(tmp_path: Path) -> None:
    owner = node(tmp_path)
    view = memoryview(owner.pool.memory)
    await write_and_publish(owner, blocks(1))
    await owner.connector.close()
    assert view[: LAYOUT.block_bytes] == content(blocks(1)[0].block_hash, LAYOUT.block_bytes)
    assert not files(tmp_path)
