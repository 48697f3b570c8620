"""How fast this machine runs Python now. Absolute figures of what is mostly Python mean something only beside it: on
shared machines it changes by a factor of up to two from hour to hour."""

import statistics
import time

_TURNS = 1_000_000
_RUNS = 5


def python_speed() -> str:
    """Returns a line that says how long a fixed loop takes; measuring it takes less than a second."""
    turn = loop_nanoseconds()
    return f"Python here and now: {turn:.0f} ns for a turn of a loop that adds up integers (median of {_RUNS} runs)"


def loop_nanoseconds() -> float:
    """Returns the time of one turn of that loop, the median of several runs."""
    return 1e9 * statistics.median(_loop_seconds() for _ in range(_RUNS)) / _TURNS


def _loop_seconds() -> float:
    total = 0
    start = time.perf_counter()
    for number in range(_TURNS):
        total += number
    return time.perf_counter() - start
