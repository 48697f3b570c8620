"""Steps of one token per sequence, recorded once for each batch size of a ladder and replayed: a replay costs the host
one call instead of one for each kernel.

Invariant: a recorded step reads its inputs from memory that stays where it is, and nothing from the host.
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
    def replay(self) -> Tensor:
        """Enqueues the step. The result is the same memory each time, valid until any other step of the same recorder
        is replayed."""
        ...


class StepRecorder(Protocol):
    """Records steps; those of one recorder share what memory they need, and never run at the same time."""

    def record(self, step: Step) -> RecordedStep:
        """Calls `step` as often as it likes."""
        ...


class CudaGraphRecorder:
    """CUDA graphs. Needs a card; everything else of this file does not."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # One of its own: with torch's default two recorders would share what libraries keep for a stream in the pool of
        # one of them, whose end is not the other's.
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def record(self, step: Step) -> RecordedStep:
        step()  # compiles kernels and lets libraries allocate, neither of which may happen while recording
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process, which move KV, may use the card meanwhile.
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
    """1, 2, 4, then multiples of 8 up to 256 and of 64 beyond, the last one `max_num_seqs`: little is padded, and few
    graphs are needed."""
    ladder = (1, 2, 4, *range(8, 257, 8), *range(320, max_num_seqs, 64))
    return (*(size for size in ladder if size < max_num_seqs), max_num_seqs)


class DecodeGraphs:
    """Recorded steps by batch size."""

    def __init__(self, recorder: StepRecorder, sizes: Sequence[int], step_of: Callable[[int], Step]) -> None:
        """Records `step_of(size)` for each size, largest first: smaller ones fit into the memory of larger ones."""
        self._steps: dict[int, RecordedStep] = {}
        self._sizes = sorted(sizes)
        for count, size in enumerate(reversed(self._sizes), start=1):
            self._steps[size] = recorder.record(step_of(size))
            if count % 8 == 0 or count == len(self._sizes):
                _logger.info("recorded %d of %d decode steps (batch size %d)", count, len(self._sizes), size)

    def size_for(self, num_seqs: int) -> int | None:
        """The smallest size that `num_seqs` sequences can be padded to."""
        return next((size for size in self._sizes if size >= num_seqs), None)

    def replay(self, size: int) -> Tensor:
        return self._steps[size].replay()
