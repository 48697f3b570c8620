"""The batch sizes that are recorded, their order, and the one that a batch is padded to."""

import pytest
import torch
from torch import Tensor

from kvrelay.engine.gpu.decode_graphs import DecodeGraphs, RecordedStep, Step, batch_sizes


@pytest.mark.parametrize(
    ("max_num_seqs", "expected"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (20, (1, 2, 4, 8, 16, 20)),
        (32, (1, 2, 4, 8, 16, 24, 32)),
    ],
)
def test_batch_sizes_are_doubled_then_grow_by_eight_up_to_the_largest_batch(
    max_num_seqs: int, expected: tuple[int, ...]
) -> None:
    assert batch_sizes(max_num_seqs) == expected


def test_large_batch_sizes_grow_by_64() -> None:
    assert batch_sizes(400)[-4:] == (256, 320, 384, 400)


class Recorder:
    def __init__(self) -> None:
        self.results: list[Tensor] = []

    def record(self, step: Step) -> RecordedStep:
        self.results.append(step())
        return Recorded(self.results[-1])


class Recorded:
    def __init__(self, result: Tensor) -> None:
        self._result = result

    def replay(self) -> Tensor:
        return self._result


def test_the_largest_is_recorded_first_and_the_smallest_that_fits_is_replayed() -> None:
    recorder = Recorder()
    graphs = DecodeGraphs(recorder, (1, 2, 4), lambda size: lambda: torch.zeros(size))
    assert [len(result) for result in recorder.results] == [4, 2, 1]
    assert [graphs.size_for(count) for count in (1, 2, 3, 4, 5)] == [1, 2, 4, 4, None]
    assert len(graphs.replay(2)) == 2
