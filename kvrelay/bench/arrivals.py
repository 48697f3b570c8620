"""Arrival times of requests in seconds from the start of the load, a pure function of their settings and a seed."""

import math
import random
from collections.abc import Iterator


def gamma_arrivals(rate: float, *, burstiness: float = 1.0, seed: int) -> Iterator[float]:
    """Yields times without end, the first one 0. `rate` is requests per second, inf for all at once.

    Gaps are gamma distributed with mean 1/rate and shape `burstiness`: 1 is a Poisson process, less is burstier, more
    is steadier. The rate of the first few is therefore another one: that of n Poisson gaps has a standard deviation of
    about 1 / sqrt(n). They are not stretched to the rate, as vLLM's benchmark does: every time would then depend on how
    many are taken, so that a longer run would not begin with the load of a shorter one. The rate that was drawn is told
    beside the figures (kvrelay/bench/offered.py).
    """
    draw = random.Random(f"arrivals/{seed}")
    at = 0.0
    while True:
        yield at
        if not math.isinf(rate):
            at += draw.gammavariate(burstiness, 1.0 / (rate * burstiness))


def periodic_arrivals(period: float, duration: float) -> Iterator[float]:
    """Yields 0, period, 2 * period and so on, all before `duration`."""
    count = 0
    while (at := count * period) < duration:
        yield at
        count += 1
