"""What kept a machine from running what is measured on it. All that is measured meanwhile is of a slower machine.

- *Memory*: when a machine is short of it, Linux takes pages of files from programs that run, which then wait until they
  are read again.
- *Stolen time*: what the host of a virtual machine gives to others while this one has something to run.
"""

import os
import time
from pathlib import Path

_PRESSURE = Path("/proc/pressure/memory")
_STAT = Path("/proc/stat")
_STALLED_SHARE = 0.01  # of the time; with memory to spare it is 0
_STOLEN_SHARE = 0.05  # of all processors' time; on a host that is not overcommitted it is below 0.01
_STEAL = 8  # its place in the first line of /proc/stat, in ticks of all processors (proc_stat(5))


class Disturbances:
    """Those since it was made, where the kernel counts them (pressure stall information, Linux 4.20; stolen time, where
    the host tells it)."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._stalled = _stalled_seconds()
        self._stolen = _stolen_seconds()

    def flaws(self) -> tuple[str, ...]:
        """Returns the flaws of what has been measured since."""
        seconds = time.monotonic() - self._started
        stalled = _stalled_seconds() - self._stalled
        stolen = (_stolen_seconds() - self._stolen) / (os.cpu_count() or 1)
        found = {
            f"the machine was short of memory: some process waited for it for {stalled:.1f} s": stalled
            > _STALLED_SHARE * seconds,
            f"the host gave {stolen / max(seconds, 1e-9):.0%} of the processors' time to others": stolen
            > _STOLEN_SHARE * seconds,
        }
        return tuple(flaw for flaw, is_true in found.items() if is_true)


def _stalled_seconds() -> float:
    try:
        some = _PRESSURE.read_text().splitlines()[0]
    except OSError:
        return 0.0  # not counted here
    return int(some.rpartition("total=")[2]) / 1e6


def _stolen_seconds() -> float:
    return int(_STAT.read_text().split(maxsplit=_STEAL + 1)[_STEAL]) / os.sysconf("SC_CLK_TCK")
