"""Segments that come and go while another node sweeps: each is told apart from the file that had its name before."""

import fcntl
from pathlib import Path

import pytest

from kv_connector.segments.segment import OwnedSegment, PeerSegment, sweep
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
