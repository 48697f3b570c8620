"""Whether a store is worth asking: only where fetching a block is faster than computing it again.

Both sides are measured rates, never configured ones. Invariant: while either is unknown the gate is open.
"""

from collections.abc import Callable

from kvrelay.core.rate import Rate

RecomputeSeconds = Callable[[int], float | None]
"""Returns the seconds that this node would take to compute so many tokens; None while that is unknown."""

_TRIAL_EVERY = 16  # one refused fetch in so many goes ahead, since the store's rate is not measured otherwise


def is_worth_fetching(num_bytes: int, bytes_per_second: float | None, recompute_seconds: float | None) -> bool:
    """Tells whether fetching `num_bytes` takes less time than computing their content; true while a rate is unknown."""
    if bytes_per_second is None or recompute_seconds is None:
        return True
    return num_bytes / bytes_per_second < recompute_seconds


class CostGate:
    """The gate in front of one store."""

    def __init__(self, recompute_seconds: RecomputeSeconds) -> None:
        self._recompute_seconds = recompute_seconds
        self._rate = Rate()
        self._num_refused = 0

    def opens(self, num_tokens: int, num_bytes: int) -> bool:
        """Tells whether to ask the store for blocks that hold so many tokens in so many bytes."""
        if is_worth_fetching(num_bytes, self._rate.per_second, self._recompute_seconds(num_tokens)):
            return True
        self._num_refused += 1
        return self._num_refused % _TRIAL_EVERY == 0

    def observe(self, num_bytes: int, seconds: float) -> None:
        """Adds a fetch that brought so many bytes in so many seconds."""
        self._rate.observe(num_bytes, seconds)
