"""Steps of some shapes, recorded once and then replayed for whatever can be padded to them: batches of decodes, and
short steps with prompts. A replay costs the host one call instead of one call per kernel, which a fast GPU would spend
more time waiting for than computing.

Invariant: a recorded step reads its inputs from memory that never moves, and nothing from the host.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_PROMPT_TOKENS = (16, 32, 64, 128, 256, 384, 512)
_PROMPT_SEQS = (1, 16, 64)

_logger = logging.getLogger(__name__)

Step = Callable[[], Tensor]
"""Enqueues a step and returns its result."""


class RecordedStep(Protocol):
    """A step that can be replayed."""

    def replay(self) -> Tensor:
        """Enqueues the step and returns its result, which is the same memory each time, and valid until another step of
        the same recorder is replayed."""
        ...


class StepRecorder(Protocol):
    """What records steps. The steps of one recorder share memory and never run at the same time."""

    def record(self, step: Step) -> RecordedStep:
        """Records `step`, which it may call more than once."""
        ...


class CudaGraphRecorder:
    """A recorder of CUDA graphs. Only this class needs a GPU."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # A stream of its own. On torch's default stream for graphs, libraries would keep memory for two recorders in
        # the pool of one of them, which may be freed before the other's.
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def record(self, step: Step) -> RecordedStep:
        step()  # compiles kernels and lets libraries allocate, neither of which may happen while recording
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process, which move KV, may use the GPU meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = step()
        return _CudaGraph(graph, result)


class _CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, result: Tensor) -> None:
        self._graph = graph
        self._result = result

    def replay(self) -> Tensor:
        self._graph.replay()
        return self._result


@dataclass(frozen=True, slots=True, order=True)
class StepShape:
    """The size of a recorded step. With `decodes` it has one token of each sequence, otherwise any number of each."""

    num_tokens: int
    num_seqs: int
    decodes: bool = False

    @property
    def longest_query(self) -> int:
        """Returns the most new tokens that a sequence may have."""
        return 1 if self.decodes else self.num_tokens


def step_shapes(max_num_seqs: int, max_num_batched_tokens: int) -> tuple[StepShape, ...]:
    """Returns the shapes to record, in ascending order.

    Batches of decodes: 1, 2, 4, multiples of 8 up to 256, multiples of 64 beyond, and `max_num_seqs`. With prompts: up
    to 512 tokens, more of which keep the GPU busy for longer than the host needs to launch their kernels. They are
    recorded for few numbers of sequences, since how attention is split depends on that number: padded to many, few long
    sequences would not be split.
    """
    batches = (1, 2, 4, *range(8, 257, 8), *range(320, max_num_seqs, 64))
    decodes = {StepShape(size, size, decodes=True) for size in _up_to(max_num_seqs, batches)}
    with_prompts = {
        StepShape(num_tokens, num_seqs)
        for num_tokens in {min(size, max_num_batched_tokens) for size in _PROMPT_TOKENS}
        for num_seqs in _up_to(max_num_seqs, _PROMPT_SEQS)
        if 1 < num_tokens >= num_seqs
    }
    return tuple(sorted(decodes | with_prompts))


def _up_to(largest: int, sizes: Sequence[int]) -> set[int]:
    return {*(size for size in sizes if size < largest), largest}


class StepGraphs:
    """The recorded steps, by shape."""

    def __init__(
        self, recorder: StepRecorder, shapes: Sequence[StepShape], step_of: Callable[[StepShape], Step]
    ) -> None:
        """Records `step_of(shape)` for each shape, largest first, so that smaller ones reuse the memory of larger
        ones."""
        self._steps: dict[StepShape, RecordedStep] = {}
        self._shapes = sorted(shapes)
        for count, shape in enumerate(reversed(self._shapes), start=1):
            self._steps[shape] = recorder.record(step_of(shape))
            if count % 8 == 0 or count == len(self._shapes):
                _logger.info("recorded %d of %d steps (of %d tokens)", count, len(self._shapes), shape.num_tokens)

    def shape_for(self, num_tokens: int, num_seqs: int) -> StepShape | None:
        """Returns the smallest recorded shape that a step can be padded to, or None."""
        decodes = num_tokens == num_seqs
        fitting = (
            shape
            for shape in self._shapes
            if shape.decodes == decodes and shape.num_tokens >= num_tokens and shape.num_seqs >= num_seqs
        )
        return next(fitting, None)

    def replay(self, shape: StepShape) -> Tensor:
        return self._steps[shape].replay()
