"""How many threads the engine computes with: its node's own, and those that other nodes of the machine lend it.

Decided before each step and, in a step of many tokens, again before each layer, so that a node that wakes up has its
cores back after one decode step or one layer of the others. Work for the process's other threads is started together
with a step's layers, which leave the interpreter to them. Invariant: only the engine's thread calls this, because
numbers of threads belong to the calling thread.
"""

from collections.abc import Callable

from paged_kernels.threads import remember_threads, use_threads

from kvrelay.core.core_table import CoreShare


class StepThreads:
    """`share`: the engine's part of the machine's cores, claimed while there are steps to run; with None the numbers of
    threads are never changed. `torch_multiplies`: as `use_threads` takes it."""

    def __init__(self, share: CoreShare | None = None, *, torch_multiplies: bool = False) -> None:
        self.num_lent_steps = 0  # steps that began with more threads than the node's own
        self.num_threads = 0  # as set last, 0 before
        self._share = share
        self._torch_multiplies = torch_multiplies
        self._put_back: Callable[[], None] | None = None  # the thread's numbers, while there are steps to run
        self._on_layers_begin: Callable[[], None] | None = None

    def begin_step(self, on_layers_begin: Callable[[], None] | None = None) -> None:
        """Claims the node's share and takes what the others do not need. `on_layers_begin` is called before the
        first layer, by runners that say when that is."""
        self._on_layers_begin = on_layers_begin
        if self._share is not None:
            self._put_back = self._put_back or remember_threads()
            self._share.claim()
            self._use(self._share.available())
            self.num_lent_steps += self.num_threads > self._share.num_cores

    def before_layer(self) -> None:
        """Within a step. Results do not depend on the number of threads, up to the rounding of matrix products."""
        if self._on_layers_begin is not None:
            self._on_layers_begin()
            self._on_layers_begin = None
        if self._share is not None and (num_threads := self._share.available()) != self.num_threads:
            self._use(num_threads)

    def _use(self, num_threads: int) -> None:
        use_threads(num_threads, torch_multiplies=self._torch_multiplies)
        self.num_threads = num_threads

    def rest(self) -> None:
        """There is nothing to do: others may have the node's cores, and the thread has its numbers back. Idempotent."""
        if self._share is not None:
            self._share.release()
        if self._put_back is not None:
            self._put_back()
            self._put_back = None
