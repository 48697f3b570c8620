"""Copies of blocks as the ranges of bytes that a device is asked to copy."""

import random

import pytest

from kv_connector.device.memory import BlockCopy, CopyRun, copy_runs


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([], []),
        ([(3, 9)], [(3, 9, 1)]),
        ([(4, 7), (3, 6), (5, 8)], [(3, 6, 3)]),
        ([(1, 5), (2, 4), (3, 3)], [(1, 5, 1), (2, 4, 1), (3, 3, 1)]),
        ([(1, 5), (2, 6), (4, 8), (5, 0)], [(1, 5, 2), (4, 8, 1), (5, 0, 1)]),
    ],
)
def test_neighbours_that_stay_neighbours_are_one_run(
    pairs: list[tuple[int, int]], expected: list[tuple[int, int, int]]
) -> None:
    assert copy_runs(BlockCopy(*pair) for pair in pairs) == [CopyRun(*run) for run in expected]


def test_runs_are_the_same_copies_in_any_order() -> None:
    draw = random.Random(1)
    blocks, slots = draw.sample(range(64), 40), draw.sample(range(64), 40)
    copies = [BlockCopy(*pair) for pair in zip(blocks, slots, strict=True)]
    runs = copy_runs(copies)
    assert {BlockCopy(run.block_id + at, run.slot + at) for run in runs for at in range(run.count)} == {*copies}
