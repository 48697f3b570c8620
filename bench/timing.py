"""What a call takes, by the wall."""

import time
from collections.abc import Callable


def wall_seconds(run: Callable[[], object]) -> float:
    """Of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
