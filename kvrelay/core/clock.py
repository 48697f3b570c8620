"""Time, as something that can be replaced: monotonic seconds from a Clock, never from the time module directly."""

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Monotonic seconds; only differences mean anything, and only inside one process."""
        ...


class MonotonicClock:
    def now(self) -> float:
        return time.monotonic()
