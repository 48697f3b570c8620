"""Turns at a store between real processes, and what the next process finds if one dies during its turn."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvrelay.core.process.weight_store import WeightStore

ROOT = Path(__file__).parents[3]
PATIENCE = 30.0

# Has a turn, says so, and ends it once it is told to.
NODE = """
import sys
from kvrelay.core.process.weight_store import WeightStore
store = WeightStore(int(sys.argv[1]))
with store.turn(lambda: print("waits", flush=True)):
    print("turn", store.note().decode() or "without a note", flush=True)
    sys.stdin.readline()
    if not store.note():
        store.clear()
        store.complete(b"of a node")
"""


@pytest.fixture
def store() -> Iterator[WeightStore]:
    descriptor = WeightStore.create()
    yield WeightStore(descriptor)
    os.close(descriptor)


@pytest.fixture
def nodes() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for node in started:
        node.kill()
        node.communicate(timeout=PATIENCE)


def start_node(store: WeightStore, nodes: list[subprocess.Popen[str]]) -> subprocess.Popen[str]:
    node = subprocess.Popen(
        [sys.executable, "-c", NODE, str(store.descriptor)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=(store.descriptor,),
    )
    nodes.append(node)
    return node


def first_and_next(
    store: WeightStore, nodes: list[subprocess.Popen[str]]
) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
    """Yields a process in its turn at an empty store, and one that waits for its turn."""
    first = start_node(store, nodes)
    assert says(first) == "turn without a note"
    second = start_node(store, nodes)
    assert says(second) == "waits"
    return first, second


def says(node: subprocess.Popen[str]) -> str:
    assert node.stdout is not None
    return node.stdout.readline().strip()


@pytest.mark.timeout(60)
def test_turns_follow_each_other_and_the_second_finds_the_first_ones_note(
    store: WeightStore, nodes: list[subprocess.Popen[str]]
) -> None:
    first, second = first_and_next(store, nodes)
    first.communicate("go on\n", timeout=PATIENCE)
    assert says(second) == "turn of a node"


@pytest.mark.timeout(60)
def test_a_node_that_dies_within_its_turn_leaves_no_note(
    store: WeightStore, nodes: list[subprocess.Popen[str]]
) -> None:
    first, second = first_and_next(store, nodes)
    first.send_signal(signal.SIGKILL)
    assert says(second) == "turn without a note"
    second.communicate("go on\n", timeout=PATIENCE)
    with store.turn(lambda: pytest.fail("both have ended")):
        assert store.note() == b"of a node"


def num_open_stores() -> int:
    """Counts this process's descriptors of stores: of others, threads that earlier tests have left may close some."""
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            count += "kvrelay-weights" in str(entry.readlink())
    return count


def test_a_store_that_cannot_be_opened_again_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a sandbox without /proc nothing can be opened again."""

    def open_nothing(path: str, flags: int) -> int:
        raise FileNotFoundError(path)

    before = num_open_stores()
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_nothing)
        with pytest.raises(FileNotFoundError):
            WeightStore.create()
    assert num_open_stores() == before


def test_a_turn_that_failed_is_over(store: WeightStore) -> None:
    before = num_open_stores()
    with pytest.raises(ZeroDivisionError), store.turn(lambda: None):
        raise ZeroDivisionError
    assert num_open_stores() == before
    with store.turn(lambda: pytest.fail("nobody has a turn")):
        pass


def test_what_was_left_unfinished_is_given_back(store: WeightStore) -> None:
    with store.turn(lambda: None):
        store.clear()
        os.pwrite(store.descriptor, b"weights", store.WEIGHTS_OFFSET)
        store.clear()
        assert os.pread(store.descriptor, 7, store.WEIGHTS_OFFSET) == b""
        assert store.note() == b""


def test_a_node_that_dies_before_its_note_is_complete_leaves_none(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwrite

    def die_after(descriptor: int, data: bytes, offset: int) -> int:
        write(descriptor, data, offset)
        raise KeyboardInterrupt

    store.clear()
    monkeypatch.setattr(os, "pwrite", die_after)
    with pytest.raises(KeyboardInterrupt):
        store.complete(b"of a node")
    assert store.note() == b""


def test_a_note_that_does_not_fit_before_the_weights_is_refused(store: WeightStore) -> None:
    for note in (b"", bytes(store.WEIGHTS_OFFSET)):
        with pytest.raises(ValueError, match="does not fit"):
            store.complete(note)
    assert store.note() == b""
