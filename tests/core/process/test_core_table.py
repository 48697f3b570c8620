"""Lending cores: the division as a function, and the table between real processes that start and die."""

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvrelay.core.process.core_table import CoreShare, CoreTable, cores_of
from tests.manual_clock import ManualClock

ROOT = Path(__file__).parents[3]

# Claims what it is told to, says so, and lives on.
NODE = """
import sys
from kvrelay.core.process.core_table import CoreShare, CoreTable
descriptor, entry, cores = map(int, sys.argv[1:])
CoreShare(cores, CoreTable(descriptor), entry).claim()
print("claimed", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("claims", "num_cores", "expected"),
    [
        ((1, 0), 2, (2, 0)),
        ((1, 1), 2, (1, 1)),
        ((4, 0, 4, 0), 16, (8, 0, 8, 0)),
        ((1, 1, 0, 1), 4, (2, 1, 0, 1)),  # what cannot be divided goes to the first
        ((2, 0, 3), 8, (4, 0, 4)),
        ((1, 1, 1, 1), 2, (1, 1, 1, 1)),  # more nodes than cores
        ((1, 0, 0, 0), 2, (2, 0, 0, 0)),
        ((3, 0), 2, (3, 0)),  # asked for by the user
        ((0, 0), 2, (0, 0)),
    ],
)
def test_what_nobody_claims_is_divided(claims: tuple[int, ...], num_cores: int, expected: tuple[int, ...]) -> None:
    assert tuple(cores_of(entry, claims, num_cores) for entry in range(len(claims))) == expected


def test_parts_add_up_and_nobody_gets_less_than_it_claims() -> None:
    for num_cores, claims in itertools.product(range(1, 9), itertools.product(range(4), repeat=3)):
        parts = [cores_of(entry, claims, num_cores) for entry in range(3)]
        assert all(part >= claim for part, claim in zip(parts, claims, strict=True))
        assert all(part == 0 for part, claim in zip(parts, claims, strict=True) if claim == 0)
        assert sum(parts) == (max(num_cores, sum(claims)) if any(claims) else 0)


@pytest.fixture
def descriptor() -> Iterator[int]:
    """Makes a table for two nodes on four cores."""
    descriptor = CoreTable.create(4, 2)
    yield descriptor
    os.close(descriptor)


def start_node(descriptor: int, entry: int, cores: int) -> subprocess.Popen[str]:
    """Starts a process that claims cores, and returns once it has."""
    process = subprocess.Popen(
        [sys.executable, "-c", NODE, str(descriptor), str(entry), str(cores)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=(descriptor,),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "claimed\n"
    return process


def test_a_dead_nodes_claim_is_released_and_its_successor_claims_again(descriptor: int) -> None:
    table = CoreTable(descriptor)
    ours = CoreShare(2, table, 0)
    ours.claim()
    assert ours.available() == 4
    for _ in range(2):
        with start_node(descriptor, 1, 2) as other:
            assert (ours.available(), table.cores_of(1)) == (2, 2)
            other.kill()
            other.wait()
            assert ours.available() == 2, "nobody has said yet that it is gone"
        table.claim(1, 0)  # as its supervisor does
        assert ours.available() == 4
    ours.release()
    assert table.cores_of(0) == 0
    assert ours.available() == 2, "its own, whatever the table says"


def test_all_who_share_a_table_know_its_name(descriptor: int) -> None:
    other = CoreTable.create(4, 2)
    names = [CoreShare(2, CoreTable(table), entry).table_name for table in (descriptor, other) for entry in range(2)]
    os.close(other)
    assert names[0] == names[1] != names[2] == names[3]
    CoreTable(descriptor).claim(0, 65535)
    assert (CoreTable(descriptor).name, len(names[0])) == (names[0], 16)


def test_without_a_table_a_node_has_its_own() -> None:
    share = CoreShare(3)
    assert share.table_name == ""
    share.claim()
    share.release()
    assert share.available() == 3


def test_a_node_of_more_threads_than_there_are_cores_can_use_all_of_them(descriptor: int) -> None:
    share = CoreShare(8, CoreTable(descriptor))
    share.claim()
    assert (share.available(), share.most()) == (8, 8)


def test_entries_do_not_touch(descriptor: int) -> None:
    table = CoreTable(descriptor)
    table.claim(1, 65535)
    assert (table.cores_of(0), table.cores_of(1)) == (0, 65535)
    table.claim(1, 0)
    table.claim(0, 1)
    assert (table.cores_of(0), table.cores_of(1)) == (4, 0)


def test_whoever_changes_a_claim_writes_what_every_node_may_use(descriptor: int) -> None:
    ours, others = CoreTable(descriptor), CoreTable(descriptor)
    limits = [ours.limit(entry) for entry in range(2)]
    for claims in ((2, 0), (2, 2), (0, 2), (0, 0)):
        ours.claim(0, claims[0])
        others.claim(1, claims[1])
        assert [limit[0] for limit in limits] == [cores_of(entry, claims, 4) for entry in range(2)]


def test_nodes_that_change_their_claims_at_the_same_time_leave_the_right_limits(descriptor: int) -> None:
    def changes_often(entry: int) -> int:
        """Returns the last claim."""
        table, chosen = CoreTable(descriptor), random.Random(entry)
        for _ in range(200):
            table.claim(entry, claim := chosen.randrange(4))
        return claim

    with ThreadPoolExecutor(2) as nodes:
        for _ in range(50):
            claims = list(nodes.map(changes_often, range(2)))
            table = CoreTable(descriptor)
            assert [table.cores_of(entry) for entry in range(2)] == [cores_of(entry, claims, 4) for entry in range(2)]


def test_a_node_sees_that_prompts_wait_on_another(descriptor: int) -> None:
    ours, other = (CoreShare(2, CoreTable(descriptor), entry) for entry in range(2))
    other.claim()
    ours.claim(prompts_wait=True)
    assert (ours.prompts_wait_elsewhere(), other.prompts_wait_elsewhere()) == (False, True)
    ours.claim()
    assert not other.prompts_wait_elsewhere()
    ours.claim(prompts_wait=True)
    CoreTable(descriptor).claim(0, 0)  # it has ended
    assert not other.prompts_wait_elsewhere()
    assert not CoreShare(2).prompts_wait_elsewhere()


@pytest.mark.parametrize("started", [0.0, 2**16 - 9.0])
def test_prompts_of_a_node_that_has_stopped_wait_for_a_while_only(descriptor: int, started: float) -> None:
    clock = ManualClock()
    clock.seconds = started
    ours, other = (CoreShare(2, CoreTable(descriptor, clock.now), entry) for entry in range(2))
    assert not other.prompts_wait_elsewhere(), "a table begins without any"
    ours.claim(prompts_wait=True)
    clock.seconds += 14.0
    assert other.prompts_wait_elsewhere()
    ours.claim(prompts_wait=True)
    clock.seconds += 14.0
    assert other.prompts_wait_elsewhere(), "it has said so again"
    clock.seconds += 2.0
    assert not other.prompts_wait_elsewhere()
