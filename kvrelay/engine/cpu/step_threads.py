"""How many threads the engine computes with: its node's own, and those that other nodes of the machine lend it.

The number is set before each step and, in a step of many tokens, before each layer. A node that wakes up therefore has
its cores back after one decode step or one layer of the other nodes. A callback for the process's other threads is
called when a step's layers begin, because these release the interpreter. Invariant: only the engine's thread calls
this, because numbers of threads belong to the calling thread.
"""

from collections.abc import Callable

from paged_kernels.threads import remember_threads, use_threads

from kvrelay.core.core_table import CoreShare


class StepThreads:
    """The number of threads of an engine's steps. `share` is the engine's share of the machine's cores, which it claims
    while it has steps to run; with None, numbers of threads are never changed. `torch_multiplies` is passed on to
    `use_threads`."""

    def __init__(self, share: CoreShare | None = None, *, torch_multiplies: bool = False) -> None:
        self.num_lent_steps = 0  # steps that began with more threads than the node's own
        self.num_threads = 0  # the number set last; 0 before the first step
        self._share = share
        self._torch_multiplies = torch_multiplies
        # Restores the thread's numbers; set while there are steps to run.
        self._put_back: Callable[[], None] | None = None
        self._on_layers_begin: Callable[[], None] | None = None

    def begin_step(self, on_layers_begin: Callable[[], None] | None = None) -> None:
        """Claims the node's share of cores, and takes those that other nodes do not need. `on_layers_begin` is called
        before the first layer, if the runner calls `before_layer`."""
        self._on_layers_begin = on_layers_begin
        if self._share is not None:
            self._put_back = self._put_back or remember_threads()
            self._share.claim()
            self._use(self._share.available())
            self.num_lent_steps += self.num_threads > self._share.num_cores

    def before_layer(self) -> None:
        """Adapts the number of threads within a step. Results do not depend on it, up to the rounding of matrix
        products."""
        if self._on_layers_begin is not None:
            self._on_layers_begin()
            self._on_layers_begin = None
        if self._share is not None and (num_threads := self._share.available()) != self.num_threads:
            self._use(num_threads)

    def _use(self, num_threads: int) -> None:
        use_threads(num_threads, torch_multiplies=self._torch_multiplies)
        self.num_threads = num_threads

    def rest(self) -> None:
        """Gives the node's cores to other nodes and restores the thread's numbers of threads, as there is nothing to
        compute. Idempotent."""
        if self._share is not None:
            self._share.release()
        if self._put_back is not None:
            self._put_back()
            self._put_back = None
