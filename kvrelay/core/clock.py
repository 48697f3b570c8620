"""Time as something that a test can replace with virtual time.

What may run under virtual time (deadlines, leases, retries, reported latencies) takes the time from a Clock or from its
event loop. The time module is read directly only where virtual time never reaches: durations that are only logged, and
short waits for hardware or for messages to another thread.
"""

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Returns monotonic seconds. Only differences have a meaning, and only within one process."""
        ...


class MonotonicClock:
    def now(self) -> float:
        return time.monotonic()
