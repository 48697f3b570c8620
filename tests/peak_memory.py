"""How much memory is taken while something runs: more than one copy of a long answer takes time, too."""

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def tracing_peak() -> Iterator[Callable[[], int]]:
    """Yields a function that returns the most bytes that were taken at a time since the context was entered."""
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
