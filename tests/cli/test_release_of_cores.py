"""What `kvrelay serve` does with the cores of a node that has ended: the others get them until it works again."""

import os
from collections.abc import Iterator

import pytest

from kvrelay.cli.serve import ServeSettings, _release_cores, node_commands, router_command
from kvrelay.cli.supervisor import ChildCommand
from kvrelay.core.config.settings import load_settings
from kvrelay.core.process.core_table import CoreTable


@pytest.fixture
def descriptor() -> Iterator[int]:
    """Yields the descriptor of a table of two cores for two nodes."""
    made = CoreTable.create(2, 2)
    yield made
    os.close(made)


def commands() -> tuple[list[ChildCommand], ChildCommand]:
    """Returns the commands of a prefill and a decode node, and that of their router."""
    settings = load_settings(ServeSettings, ["m"], prog="kvrelay serve")
    return node_commands(settings, {}, cores=2), router_command(settings, {}, prefill=["p:1"], decode=["d:1"])


def cores(table: CoreTable) -> list[int]:
    return [table.cores_of(entry) for entry in range(2)]


@pytest.mark.parametrize(("which", "left"), [(0, [0, 2]), (1, [2, 0])])
def test_a_node_that_has_ended_leaves_its_cores_to_the_other(descriptor: int, which: int, left: list[int]) -> None:
    nodes, router = commands()
    release, table = _release_cores(nodes, descriptor), CoreTable(descriptor)
    for entry in range(2):
        table.claim(entry, 1)
    release(router)
    assert cores(table) == [1, 1], "a router computes nothing"
    release(nodes[which])
    assert cores(table) == left


def test_without_a_table_there_is_nothing_to_release() -> None:
    nodes, router = commands()
    release = _release_cores(nodes, None)
    for command in (*nodes, router):
        release(command)
