"""Segments that come and go while another node sweeps: each is told apart from the file that had its name before."""

import errno
import fcntl
import os
import tempfile
from pathlib import Path

import pytest

from kv_connector.geometry import Geometry
from kv_connector.segments import segment
from kv_connector.segments.segment import MAX_HANDLE_BYTES, OwnedSegment, PeerSegment, Preamble, sweep
from kv_connector.segments.shared_memory import SharedMemoryConnector
from kv_connector.settings import SharedMemorySettings
from kvrelay.core.errors import ConfigurationError, KVError
from tests.kv_connector.backends import LAYOUT


def owned_segment(directory: Path) -> OwnedSegment:
    return OwnedSegment(directory, "owner", 1, LAYOUT, 4)


def test_a_segment_that_is_swept_before_it_is_locked_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = fcntl.flock

    def swept_before(fd: int, operation: int) -> None:
        monkeypatch.undo()
        assert sweep(tmp_path) == 1
        lock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", swept_before)
    owned = owned_segment(tmp_path)
    peer = PeerSegment(tmp_path, owned.path.name)
    assert peer.owner_is_alive()
    peer.close()
    owned.close()


def test_a_sweep_spares_a_segment_that_has_replaced_a_dead_one_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, replacements = fcntl.flock, []

    def replaced_before(fd: int, operation: int) -> None:
        monkeypatch.undo()
        assert sweep(tmp_path) == 1
        replacements.append(owned_segment(tmp_path))
        lock(fd, operation)

    dead = tmp_path / "kvrelay-owner-0000000000000001.kv"
    dead.touch()
    monkeypatch.setattr(fcntl, "flock", replaced_before)
    assert sweep(tmp_path) == 0
    [owned] = replacements
    assert owned.path == dead and dead.exists()
    owned.close()


@pytest.mark.parametrize("handle", [None, b"", bytes(range(64)), b"x" * MAX_HANDLE_BYTES])
def test_a_peer_has_the_pool_or_the_handle_of_one_on_a_device(tmp_path: Path, handle: bytes | None) -> None:
    owned = OwnedSegment(tmp_path, "owner", 1, LAYOUT, 4, device_handle=handle)
    peer = PeerSegment(tmp_path, owned.path.name, on_device=handle is not None)
    assert peer.device_handle == (handle or b"")
    assert peer.rows.shape == (4 if handle is None else 0, LAYOUT.block_bytes)
    peer.close()
    owned.close()


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(("num_blocks", "block_bytes", "excess"), [(0, 2**63, 0), (4, 0, 0), (4, 4096, 4096)])
def test_a_peer_refuses_a_segment_that_describes_itself_wrongly(
    tmp_path: Path, num_blocks: int, block_bytes: int, excess: int, on_device: bool
) -> None:
    preamble = Preamble(1, Geometry(b"d" * 32, block_bytes), num_blocks, on_device=on_device)
    path = tmp_path / "kvrelay-owner-0000000000000001.kv"
    path.write_bytes(preamble.encode().ljust(preamble.file_bytes + excess, b"\0"))
    with pytest.raises(KVError, match="does not match its description"):
        PeerSegment(tmp_path, path.name, on_device=on_device)


def test_without_space_for_the_headers_of_a_pool_on_a_device_the_start_says_what_needs_it(tmp_path: Path) -> None:
    what = r"headers of 1099511627776 KV blocks .* need 131072\.\d+ GiB .* has [\d.]+ .iB free: .*--shm-size"
    with pytest.raises(ConfigurationError, match=what):
        OwnedSegment(tmp_path, "owner", 1, LAYOUT, 1 << 40, device_handle=b"")


def test_a_start_that_loses_its_space_to_another_one_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    what = r"4 blocks needs [\d.]+ MiB of shared memory, .* free, of which another node has just taken some: use fewer"
    with pytest.raises(ConfigurationError, match=what):
        OwnedSegment(tmp_path, "owner", 1, LAYOUT, 4)
    assert not list(tmp_path.iterdir())


def test_without_shared_memory_and_a_temporary_directory_the_start_says_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment, "_SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "tmp")])
    with pytest.raises(ConfigurationError, match=r"--shared-memory-dir: '.*/shm' is not a directory"):
        SharedMemoryConnector(SharedMemorySettings()).allocate(LAYOUT, 4, node_id="owner", epoch=1)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path)])
    assert segment.segment_directory(SharedMemorySettings()) == tmp_path
