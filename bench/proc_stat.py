"""Facts about any process of this machine (Linux). All raise OSError for one that has ended."""

import time
from pathlib import Path


def parent_of(process: int) -> int:
    # Behind the program's name, which may itself contain spaces and parentheses: the state, then the parent.
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def processor_seconds(process: int) -> float:
    """Returns the processor time that all threads of `process` have taken since it started, to the nanosecond:
    /proc/PID/stat counts hundredths of a second, in which a short run takes none."""
    clock = (~process << 3) | 2  # its number by clock_getcpuclockid(3), which Python has for threads only
    return time.clock_gettime(clock)
