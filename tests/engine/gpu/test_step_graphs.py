"""The shapes that are recorded, their order, and the one that a step is padded to."""

import pytest
import torch
from torch import Tensor

from kvrelay.engine.gpu.step_graphs import RecordedStep, Step, StepGraphs, StepShape, step_shapes


def batches(max_num_seqs: int) -> list[int]:
    shapes = step_shapes(max_num_seqs, 2048)
    assert all(shape.num_tokens == shape.num_seqs for shape in shapes if shape.decodes)
    return [shape.num_seqs for shape in shapes if shape.decodes]


@pytest.mark.parametrize(
    ("max_num_seqs", "expected"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (20, [1, 2, 4, 8, 16, 20]),
        (32, [1, 2, 4, 8, 16, 24, 32]),
    ],
)
def test_batches_of_decodes_are_doubled_then_grow_by_eight_up_to_the_largest(
    max_num_seqs: int, expected: list[int]
) -> None:
    assert batches(max_num_seqs) == expected


def test_large_batches_of_decodes_grow_by_64() -> None:
    assert batches(400)[-4:] == [256, 320, 384, 400]


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_batched_tokens", "expected"),
    [
        (1, 40, [(16, 1), (32, 1), (40, 1)]),
        (20, 32, [(16, 1), (16, 16), (32, 1), (32, 16), (32, 20)]),
        (4, 1, []),
    ],
)
def test_steps_with_prompts_are_recorded_for_few_tokens_and_several_numbers_of_sequences(
    max_num_seqs: int, max_num_batched_tokens: int, expected: list[tuple[int, int]]
) -> None:
    shapes = step_shapes(max_num_seqs, max_num_batched_tokens)
    assert [(shape.num_tokens, shape.num_seqs) for shape in shapes if not shape.decodes] == expected
    assert all(shape.longest_query == shape.num_tokens for shape in shapes if not shape.decodes)


def test_no_step_with_prompts_of_more_than_512_tokens_is_recorded() -> None:
    assert max(step_shapes(256, 2048)) == StepShape(512, 256)


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
    decodes = [StepShape(size, size, decodes=True) for size in (1, 2, 4)]
    prompts = [StepShape(4, 1), StepShape(8, 1), StepShape(8, 4)]
    graphs = StepGraphs(recorder, (*decodes, *prompts), lambda shape: lambda: torch.zeros(shape.num_tokens))
    assert [len(result) for result in recorder.results] == [8, 8, 4, 4, 2, 1]
    assert [graphs.shape_for(count, count) for count in (1, 2, 3, 4, 5)] == [*decodes[:2], *2 * decodes[2:], None]
    assert [graphs.shape_for(*step) for step in ((2, 1), (5, 1), (3, 2), (9, 1), (8, 5))] == [*prompts, None, None]
    assert len(graphs.replay(decodes[1])) == 2
