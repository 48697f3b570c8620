"""Steps of one token per sequence, recorded once for some batch sizes and then replayed. A replay costs the host one
call instead of one call per kernel.

Invariant: a recorded step reads its inputs from memory that never moves, and nothing from the host.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

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


def batch_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Returns the batch sizes to record: 1, 2, 4, multiples of 8 up to 256, multiples of 64 beyond, and `max_num_seqs`.
    With them little is padded and few graphs are needed."""
    ladder = (1, 2, 4, *range(8, 257, 8), *range(320, max_num_seqs, 64))
    return (*(size for size in ladder if size < max_num_seqs), max_num_seqs)


class DecodeGraphs:
    """The recorded steps, by batch size."""

    def __init__(self, recorder: StepRecorder, sizes: Sequence[int], step_of: Callable[[int], Step]) -> None:
        """Records `step_of(size)` for each size, largest first, so that smaller ones reuse the memory of larger
        ones."""
        self._steps: dict[int, RecordedStep] = {}
        self._sizes = sorted(sizes)
        for count, size in enumerate(reversed(self._sizes), start=1):
            self._steps[size] = recorder.record(step_of(size))
            if count % 8 == 0 or count == len(self._sizes):
                _logger.info("recorded %d of %d decode steps (batch size %d)", count, len(self._sizes), size)

    def size_for(self, num_seqs: int) -> int | None:
        """Returns the smallest recorded size that `num_seqs` sequences can be padded to, or None."""
        return next((size for size in self._sizes if size >= num_seqs), None)

    def replay(self, size: int) -> Tensor:
        return self._steps[size].replay()
