"""Facts about any process of this machine, from /proc/PID/stat (Linux). All raise OSError for one that has ended."""

import os
from pathlib import Path


def parent_of(process: int) -> int:
    return int(_fields(process)[1])


def processor_seconds(process: int) -> float:
    """Returns the user and system time that all threads of `process` have taken since it started."""
    fields = _fields(process)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _fields(process: int) -> list[str]:
    """Returns the fields behind the program's name, which may itself contain spaces and parentheses."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
