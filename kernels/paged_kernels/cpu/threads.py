"""How many threads the compiled kernels compute on. They are a team of their own, not torch's
(`csrc/runtime/parallel.h`).

Idle torch threads spin on cores that the team needs, so where our kernels compute the matrix products, torch gets one
thread. Both counts belong to the calling thread, but torch copies the count that was set last into every thread that it
has not seen. This module therefore remembers torch's count from before the first change: threads that were not
configured report it, and every thread gets it back in the end. Only a thread that torch first sees in between, and that
uses torch for purposes of its own, gets a count that was not meant for it. Invariant: whoever configures a thread puts
its counts back.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

_own = threading.local()
_lock = threading.Lock()


@dataclass(slots=True)
class _Configured:
    """How many threads are configured, and torch's count before the first of them was."""

    threads: int = 0
    torch_count: int = 0


_configured = _Configured()


def num_threads() -> int:
    """Returns the count that `use_threads` set last on this thread; torch's, where it never did."""
    count = _own_count()
    if count is not None:
        return count
    with _lock:
        return _configured.torch_count if _configured.threads else torch.get_num_threads()


def use_threads(count: int, *, torch_multiplies: bool = False) -> None:
    """Sets how many threads this thread's kernels compute on. torch gets as many if it multiplies the matrices, else
    one."""
    if _own_count() is None:
        with _lock:
            if _configured.threads == 0:
                _configured.torch_count = torch.get_num_threads()
            _configured.threads += 1
    _own.count = count
    torch.set_num_threads(count if torch_multiplies else 1)


def remember_threads() -> Callable[[], None]:
    """Returns a function that puts both counts of this thread back. Call it on the same thread."""
    count = _own_count()
    of_torch = num_threads() if count is None else torch.get_num_threads()

    def put_back() -> None:
        if count is None and _own_count() is not None:
            with _lock:
                _configured.threads -= 1
        _own.count = count
        torch.set_num_threads(of_torch)

    return put_back


@contextmanager
def threads_kept() -> Iterator[None]:
    """Puts both counts of this thread back at the end of the block."""
    put_back = remember_threads()
    try:
        yield
    finally:
        put_back()


def _own_count() -> int | None:
    return getattr(_own, "count", None)
