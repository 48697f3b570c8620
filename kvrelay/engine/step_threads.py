"""How many threads the engine computes with: its node's own, those that other nodes of the machine lend it, or one for
a step so small that a second thread takes more from the machine's other processes than it gives.

Looked at before each step, and in one of many tokens again before each layer, so that a node that wakes has its cores
back after a decode step or one layer of the others. What other threads of the process have to do beside a step is
started with its layers, which leave the interpreter to them. Invariant: only the engine's thread calls this, for torch
keeps a number per thread.
"""

import sys
from collections.abc import Callable

import torch

from kvrelay.core.core_table import CoreShare

# What a step's parallel regions are worth goes by the bytes of its weights, and by its rows as if the weights were read
# once more for every so many. Below this many bytes in all, regions are so short that a second thread gains less than
# it costs: the machine's other cores are for the router and the client then (docs/benchmarks_amx.md).
_ROWS_PER_READING = 64
_SMALL_STEP_BYTES = 48_000_000


def is_small(weight_bytes: int, num_tokens: int) -> bool:
    """Whether a step of so many tokens, over weights of so many bytes, is for one thread. That of a stream which is
    alone never is: its tokens travel together (`stream_interval`), so that others have little to do beside it."""
    return num_tokens > 1 and weight_bytes * (_ROWS_PER_READING + num_tokens) < _SMALL_STEP_BYTES * _ROWS_PER_READING


class StepThreads:
    """`share`: what the node has of the machine's cores, claimed while there are steps to run; None leaves torch's
    number of threads alone, always. `weight_bytes`: what a step reads."""

    def __init__(self, share: CoreShare | None = None, weight_bytes: int = 0) -> None:
        self.num_lent_steps = 0  # that began with more threads than the node's own
        self._share = share
        self._weight_bytes = weight_bytes
        self._most = 1  # threads in this step
        self.num_threads = 0  # as set last, 0 before
        self._beside: Callable[[], None] | None = None

    def begin_step(self, num_tokens: int, beside: Callable[[], None] | None = None) -> None:
        """Claims the node's share and takes what the others do not need. `beside` is called before the first layer, by
        runners that say when that is."""
        self._beside = beside
        if self._share is not None:
            self._share.claim()
            self._most = 1 if is_small(self._weight_bytes, num_tokens) else sys.maxsize
            self._adjust()
            self.num_lent_steps += self.num_threads > self._share.num_cores

    def before_layer(self) -> None:
        """Within a step. Results do not depend on the number of threads, up to the rounding of matrix products."""
        if self._beside is not None:
            self._beside()
            self._beside = None
        self._adjust()

    def _adjust(self) -> None:
        if self._share is not None:
            num_threads = min(self._most, self._share.available())
            if num_threads != self.num_threads:
                torch.set_num_threads(num_threads)
                self.num_threads = num_threads

    def rest(self) -> None:
        """There is nothing to do: others may have the node's cores. Idempotent."""
        if self._share is not None:
            self._share.release()
