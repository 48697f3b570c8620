"""How many threads the compiled kernels compute on. They are a team of their own (`csrc/parallel.h`), not torch's.

Torch's threads wait for each other in a loop, on cores that the team needs then: where the kernels do the matrix
products, torch gets a single thread. Both numbers belong to the calling thread.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_own = threading.local()


def num_threads() -> int:
    """As `use_threads` has said last on this thread; before that, torch's number."""
    count: int | None = getattr(_own, "count", None)
    return torch.get_num_threads() if count is None else count


def use_threads(count: int, *, torch_multiplies: bool = False) -> None:
    """For what this thread computes from now on. `torch_multiplies`: torch gets as many, because products are its."""
    _own.count = count
    torch.set_num_threads(count if torch_multiplies else 1)


def remember_threads() -> Callable[[], None]:
    """A call of what it returns, on the same thread, puts both numbers back."""
    count, of_torch = getattr(_own, "count", None), torch.get_num_threads()

    def put_back() -> None:
        _own.count = count
        torch.set_num_threads(of_torch)

    return put_back


@contextmanager
def threads_kept() -> Iterator[None]:
    """Afterwards both numbers are what they were."""
    put_back = remember_threads()
    try:
        yield
    finally:
        put_back()
