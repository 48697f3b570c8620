"""Tells when requests wait for blocks that leases hold, perhaps for decode nodes that in turn wait for these requests.

Only the end of a lease lets them go on then. Invariant: progress is never taken for a stall. So each load has to come
from the engine itself, which could have made a step since the load before.
"""

from kvrelay.engine.step_result import EngineLoad

_PATIENT_LOOKS = 10  # in which the same request may lack room while others, of a higher priority, go on


class StallWatch:
    """What compares the load of a prefill node with that of the look before."""

    def __init__(self) -> None:
        self._seen = EngineLoad()
        self._num_lacking = 0  # looks in a row at which the same request lacked room

    def is_stalled(self, load: EngineLoad) -> bool:
        """Looks once more, at intervals of about a second. Tells whether requests wait, none runs and no step was made
        since the last look, or the first of them has lacked room for `_PATIENT_LOOKS` while others overtake it; what is
        done about a stall gets as many again to show."""
        seen, self._seen = self._seen, load
        still_lacks = load.first_lacking > 0 and load.first_lacking == seen.first_lacking
        self._num_lacking = self._num_lacking + 1 if still_lacks else 0
        if load.num_requests_waiting == 0:
            return False
        is_idle = load.num_requests_running == 0 and seen.num_requests_running == 0
        nothing_moves = is_idle and load.num_steps == seen.num_steps
        if not nothing_moves and self._num_lacking < _PATIENT_LOOKS:
            return False
        self._num_lacking = 0
        return True
