"""What a call takes, by the wall, and how ours and torch's threads are kept from each other meanwhile."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from paged_kernels.threads import num_threads, threads_kept, use_threads

_TORCH_FALLS_ASLEEP_SECONDS = 0.02


def wall_seconds(run: Callable[[], object]) -> float:
    """Of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


@contextmanager
def torch_computes() -> Iterator[None]:
    """Torch has as many threads as our kernels have. They go on turning in a loop for some milliseconds after they have
    computed, on the cores that ours need: the context ends when they are asleep."""
    with threads_kept():
        use_threads(num_threads(), torch_multiplies=True)
        yield
    time.sleep(_TORCH_FALLS_ASLEEP_SECONDS)
