"""How many threads the engine computes with: its node's own plus those that other nodes of the machine lend it, or a
single one for a step so small that a second thread would cost the machine's other processes more than it gains.

Decided before each step and, in a step of many tokens, again before each layer, so that a node that wakes up has its
cores back after one decode step or one layer of the others. Work for the process's other threads is started together
with a step's layers, which leave the interpreter to them. Invariant: only the engine's thread calls this, because torch
keeps the number of threads per thread.
"""

import sys
from collections.abc import Callable

import torch

from kvrelay.core.core_table import CoreShare

# A step's work is estimated by the bytes of its weights, counted once more for every _ROWS_PER_READING rows. Below
# _SMALL_STEP_BYTES in all, parallel regions are so short that a second thread gains less than it costs, and the
# machine's other cores are left to the router and the client (docs/benchmarks_amx.md).
_ROWS_PER_READING = 64
_SMALL_STEP_BYTES = 48_000_000


def is_small(weight_bytes: int, num_tokens: int) -> bool:
    """Whether a step of `num_tokens` tokens over weights of `weight_bytes` bytes is for one thread. A step of a stream
    that is alone never is: its tokens travel together (`stream_interval`), so other processes have little to do."""
    return num_tokens > 1 and weight_bytes * (_ROWS_PER_READING + num_tokens) < _SMALL_STEP_BYTES * _ROWS_PER_READING


class StepThreads:
    """`share`: the node's part of the machine's cores, claimed while there are steps to run; with None torch's number
    of threads is never changed. `weight_bytes`: what a step reads."""

    def __init__(self, share: CoreShare | None = None, weight_bytes: int = 0) -> None:
        self.num_lent_steps = 0  # steps that began with more threads than the node's own
        self._share = share
        self._weight_bytes = weight_bytes
        self._most = 1  # threads in this step
        self.num_threads = 0  # as set last, 0 before
        self._on_layers_begin: Callable[[], None] | None = None

    def begin_step(self, num_tokens: int, on_layers_begin: Callable[[], None] | None = None) -> None:
        """Claims the node's share and takes what the others do not need. `on_layers_begin` is called before the
        first layer, by runners that say when that is."""
        self._on_layers_begin = on_layers_begin
        if self._share is not None:
            self._share.claim()
            self._most = 1 if is_small(self._weight_bytes, num_tokens) else sys.maxsize
            self._adjust()
            self.num_lent_steps += self.num_threads > self._share.num_cores

    def before_layer(self) -> None:
        """Within a step. Results do not depend on the number of threads, up to the rounding of matrix products."""
        if self._on_layers_begin is not None:
            self._on_layers_begin()
            self._on_layers_begin = None
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
