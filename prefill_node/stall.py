"""Tells when requests wait for blocks that leases hold, perhaps for decode nodes that in turn wait for these requests.

Only the end of a lease lets them go on then. Invariant: progress is never taken for a stall. So each load has to come
from the engine itself, which could have made a step since the load before; and a decode node that is full and takes
what it has leased as soon as others there end is given time, since it would have to compute what ends before.
"""

from kvrelay.engine.step_result import EngineLoad

_PATIENT_LOOKS = 10  # in a row that show no progress


class StallWatch:
    """What compares the load of a prefill node with that of the look before."""

    def __init__(self) -> None:
        self._seen = EngineLoad()
        self._num_released = 0  # leases, at the last look
        self._num_idle = 0  # looks in a row between which nothing ran here, and no lease was released
        self._num_lacking = 0  # looks in a row at which the same request lacked room

    def is_stalled(self, load: EngineLoad, num_released: int) -> bool:
        """Looks once more, at intervals of about a second. Tells whether requests have waited for `_PATIENT_LOOKS`
        while none ran, no step was made and no reader released a lease (`num_released` have been, since the start), and
        again at each look at which that is still so; or whether the first of them has lacked room for as long while
        others overtake it, and what is done about that gets as many looks again to show."""
        seen, self._seen = self._seen, load
        still_lacks = load.first_lacking > 0 and load.first_lacking == seen.first_lacking
        self._num_lacking = self._num_lacking + 1 if still_lacks else 0
        ran = load.num_requests_running > 0 or seen.num_requests_running > 0 or load.num_steps != seen.num_steps
        waits = load.num_requests_waiting > 0 and seen.num_requests_waiting > 0
        self._num_idle = self._num_idle + 1 if waits and not ran and num_released == self._num_released else 0
        self._num_released = num_released
        if load.num_requests_waiting == 0 or max(self._num_idle, self._num_lacking) < _PATIENT_LOOKS:
            return False
        self._num_lacking = 0
        return True
