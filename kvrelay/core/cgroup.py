"""What a container or a service manager lets this process use (Linux, cgroup v2).

The limits of a cgroup hold for all that is in it. So those of this process are those of its own cgroup and of all
around that. In a container its own one usually looks like the root.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path


def cgroup_folders(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> list[Path]:
    """Returns the folders of this process's cgroup and of those around it, innermost first."""
    lines = membership.read_text().splitlines() if membership.is_file() else []
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    steps = Path(own).parts
    if ".." in steps:  # it lies outside of what can be seen from here
        steps = ()
    return [root.joinpath(*steps[:depth]) for depth in range(len(steps), -1, -1)]


def available_cores(cgroups: Sequence[Path] | None = None) -> int:
    """Returns how many cores this process may use by its affinity and by the quotas of its cgroups."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    for quota in (folder / "cpu.max" for folder in (cgroup_folders() if cgroups is None else cgroups)):
        limit, period = quota.read_text().split() if quota.is_file() else ("max", "")
        if limit != "max":
            cores = min(cores, max(1, int(limit) // int(period)))
    return cores
