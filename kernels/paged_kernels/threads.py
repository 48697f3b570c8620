"""How many threads the compiled kernels compute on. They are a team of their own (`csrc/parallel.h`), not torch's.

Torch's threads wait for each other in a loop, on cores that the team needs then: where the kernels do the matrix
products, torch gets a single thread. Both numbers are the calling thread's. But what one thread sets, torch gives to
every thread that is new to it. Here is therefore remembered what it was before the first thread was told: the number of
those which were not, and what all have again in the end. Only a thread that is new to torch meanwhile, and uses it for
purposes of its own, gets a number that was not meant for it. Invariant: who tells a thread puts its numbers back.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

_own = threading.local()
_lock = threading.Lock()


@dataclass(slots=True)
class _Told:
    """The threads with a number of their own. `of_torch`: torch's before the first of them."""

    count: int = 0
    of_torch: int = 0


_told = _Told()


def num_threads() -> int:
    """As `use_threads` has said last on this thread; otherwise torch's number."""
    count = _own_count()
    if count is not None:
        return count
    with _lock:
        return _told.of_torch if _told.count else torch.get_num_threads()


def use_threads(count: int, *, torch_multiplies: bool = False) -> None:
    """For what this thread computes from now on. `torch_multiplies`: torch gets as many, because products are its."""
    if _own_count() is None:
        with _lock:
            if _told.count == 0:
                _told.of_torch = torch.get_num_threads()
            _told.count += 1
    _own.count = count
    torch.set_num_threads(count if torch_multiplies else 1)


def remember_threads() -> Callable[[], None]:
    """A call of what it returns, on the same thread, puts both numbers back."""
    count = _own_count()
    of_torch = num_threads() if count is None else torch.get_num_threads()

    def put_back() -> None:
        if count is None and _own_count() is not None:
            with _lock:
                _told.count -= 1
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


def _own_count() -> int | None:
    return getattr(_own, "count", None)
