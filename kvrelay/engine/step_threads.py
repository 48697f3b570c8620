"""How many threads the engine computes with: its node's own, and those that other nodes of the machine lend it.

Looked at before each step and again before each layer, so that a node that wakes has its cores back after one layer of
the others. Invariant: only the engine's thread calls this, for torch's number is one per thread.
"""

import torch

from kvrelay.core.core_table import CoreShare


class StepThreads:
    """`share`: what the node has of the machine's cores, claimed while there are steps to run; None leaves torch's
    number of threads alone."""

    def __init__(self, share: CoreShare | None = None) -> None:
        self.num_lent_steps = 0  # that began with more threads than the node's own
        self._share = share
        self._num_threads = 0  # as set last, 0 before

    def begin_step(self) -> None:
        """Claims the node's share and takes what the others do not need."""
        if self._share is not None:
            self._share.claim()
            self.adjust()
            self.num_lent_steps += self._num_threads > self._share.num_cores

    def adjust(self) -> None:
        """Within a step. Results do not depend on the number of threads, up to the rounding of matrix products."""
        if self._share is not None:
            num_threads = self._share.available()
            if num_threads != self._num_threads:
                torch.set_num_threads(num_threads)
                self._num_threads = num_threads

    def rest(self) -> None:
        """There is nothing to do: others may have the node's cores. Idempotent."""
        if self._share is not None:
            self._share.release()
