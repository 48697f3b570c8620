"""How many threads the engine computes with: its node's own, and those that other nodes of the machine lend it.

Our kernels read the number from the table of cores before every item of their work, of which a product has several.
Where torch multiplies, it is set before each step and, in a step of many tokens, before each layer. A callback for the
process's other threads is called when a step's layers begin, because these release the interpreter. Invariant: only the
engine's thread calls this, because numbers of threads belong to the calling thread.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from paged_kernels.cpu.extension import load_extension
from paged_kernels.cpu.threads import remember_threads, use_threads

from kvrelay.core.process.core_table import CoreShare

if TYPE_CHECKING:
    from paged_kernels._native import ThreadLimit


class StepThreads:
    """The number of threads of an engine's steps. `share` is the engine's share of the machine's cores, which it claims
    while it has steps to run; with None, numbers of threads are never changed. `torch_multiplies` is passed on to
    `use_threads`."""

    def __init__(self, share: CoreShare | None = None, *, torch_multiplies: bool = False) -> None:
        self.num_borrowing_steps = 0  # steps that began with more threads than the node's own
        self.num_threads = 0  # how many there were for the last step or layer; 0 before the first step
        self._share = share
        self._torch_multiplies = torch_multiplies
        self._limit = None if torch_multiplies or share is None else _thread_limit(share)
        # Restores the thread's numbers; set while there are steps to run.
        self._put_back: Callable[[], None] | None = None
        self._on_layers_begin: Callable[[], None] | None = None

    def begin_step(self, on_layers_begin: Callable[[], None] | None = None, *, prompts_wait: bool = False) -> None:
        """Claims the node's share of cores, and takes those that other nodes do not need. `prompts_wait` says whether
        some are left for later steps. `on_layers_begin` is called before the first layer, if the runner calls
        `before_layer`."""
        self._on_layers_begin = on_layers_begin
        if self._share is not None:
            if self._put_back is None:
                self._put_back = remember_threads()
                if self._limit is not None:
                    self._limit.begin()
            self._share.claim(prompts_wait=prompts_wait)
            self._use(self._share, self._share.available())
            self.num_borrowing_steps += self.num_threads > self._share.num_cores

    def before_layer(self) -> None:
        """Adapts the number of threads within a step. Results do not depend on it, up to the rounding of matrix
        products."""
        if self._on_layers_begin is not None:
            self._on_layers_begin()
            self._on_layers_begin = None
        if self._share is not None and (num_threads := self._share.available()) != self.num_threads:
            self._use(self._share, num_threads)

    def _use(self, share: CoreShare, num_threads: int) -> None:
        told = num_threads if self._limit is None else share.most()  # of which calls use as many as the limit says
        use_threads(told, torch_multiplies=self._torch_multiplies)
        self.num_threads = num_threads

    @property
    def shares_cores(self) -> bool:
        """Tells whether other nodes of the machine may use the cores of this one."""
        return self._share is not None and self._share.table is not None

    @property
    def core_table(self) -> str:
        """Returns the name of the table through which nodes lend each other cores, nothing if this one shares none."""
        return "" if self._share is None else self._share.table_name

    def has_borrowed_cores(self) -> bool:
        """Tells whether a node that has claimed its cores may now use others as well."""
        return self._share is not None and self._share.available() > self._share.num_cores

    def prompts_wait_elsewhere(self) -> bool:
        """Tells whether prompts wait on another node, which computes them sooner with the cores of this one."""
        return self._share is not None and self._share.prompts_wait_elsewhere()

    def rest(self) -> None:
        """Gives the node's cores to other nodes and restores the thread's numbers of threads, as there is nothing to
        compute. Idempotent."""
        if self._share is not None:
            self._share.release()
        if self._put_back is not None:
            if self._limit is not None:
                self._limit.end()
            self._put_back()
            self._put_back = None


def _thread_limit(share: CoreShare) -> "ThreadLimit | None":
    """Returns what lets our kernels read how many threads to use, if the kernels were compiled and nodes lend cores."""
    extension = load_extension()
    return None if extension is None or share.table is None else extension.ThreadLimit(share.table.limit(share.entry))
