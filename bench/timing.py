"""Wall time of a call, and how the threads of torch and of our kernels keep off each other's cores while it runs."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from paged_kernels.cpu.threads import num_threads, threads_kept, use_threads

_TORCH_FALLS_ASLEEP_SECONDS = 0.02


def wall_seconds(run: Callable[[], object]) -> float:
    """Returns the wall time of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


@contextmanager
def torch_computes() -> Iterator[None]:
    """Gives torch as many threads as our kernels have, for code that computes with torch. Torch's threads spin for some
    milliseconds after they have computed, on the cores that ours need, so the context ends only when they sleep."""
    with threads_kept():
        use_threads(num_threads(), torch_multiplies=True)
        yield
    time.sleep(_TORCH_FALLS_ASLEEP_SECONDS)
