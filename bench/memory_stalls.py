"""How long a machine has waited for memory: when it is short of it, Linux takes pages of files from programs that run,
which then wait until they are read again, and all that is measured meanwhile is of a slower machine."""

import time
from pathlib import Path

_PRESSURE = Path("/proc/pressure/memory")
_SHARE = 0.01  # of the time; with memory to spare it is 0


class MemoryStalls:
    """Those since it was made, where the kernel counts them (pressure stall information, Linux 4.20)."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._before = _stalled_seconds()

    def flaws(self) -> tuple[str, ...]:
        """Returns the flaw of what has been measured since, if some process waited for more than a hundredth of the
        time."""
        stalled = _stalled_seconds() - self._before
        if stalled <= _SHARE * (time.monotonic() - self._started):
            return ()
        return (f"the machine was short of memory: some process waited for it for {stalled:.1f} s",)


def _stalled_seconds() -> float:
    try:
        some = _PRESSURE.read_text().splitlines()[0]
    except OSError:
        return 0.0  # not counted here
    return int(some.rpartition("total=")[2]) / 1e6
