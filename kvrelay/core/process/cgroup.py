"""What a container or a service manager lets this process use of the machine's cores and memory (Linux; cgroup v2 and
v1).

The limits of a cgroup hold for all that is in it. So those of this process are those of its own cgroup and of all
around that. In a container its own one usually looks like the root.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_MEMBERSHIP = Path("/proc/self/cgroup")


def folders_v2(root: Path = Path("/sys/fs/cgroup"), membership: Path = _MEMBERSHIP) -> list[Path]:
    """Returns the folders of this process's cgroup of v2 and of those around it, innermost first."""
    own = next((line.removeprefix("0::/") for line in _lines(membership) if line.startswith("0::/")), "")
    return _folders(root, own)


def folders_v1(
    controller: str, membership: Path = _MEMBERSHIP, mounts: Path = Path("/proc/self/mountinfo")
) -> list[Path]:
    """Returns the same for the cgroup that v1 has for `controller`, "cpu" or "memory"; nothing where v1 has none."""
    groups = (line.split(":", 2) for line in _lines(membership))
    own = next((path for _, controllers, path in groups if controller in controllers.split(",")), "/")
    for line in _lines(mounts):  # ID PARENT DEVICE ROOT FOLDER OPTIONS ... - TYPE SOURCE CONTROLLERS
        mount, _, file_system = line.partition(" - ")
        fields = file_system.split(" ")
        if fields[0] == "cgroup" and controller in fields[-1].split(","):
            root, folder = mount.split(" ")[3:5]
            visible = Path(own).relative_to(root) if Path(own).is_relative_to(root) else Path()
            return _folders(Path(folder), str(visible))
    return []


def available_cores(cgroups: Sequence[Path] | None = None) -> int:
    """Returns how many cores this process may use by its affinity and by the quotas of its cgroups."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    for folder in (*folders_v2(), *folders_v1("cpu")) if cgroups is None else cgroups:
        limit, period = _quota(folder)
        if limit > 0:
            cores = min(cores, max(1, limit // period))
    return cores


def free_memory(meminfo: Path = Path("/proc/meminfo"), cgroups: Sequence[Path] | None = None) -> int:
    """Returns the bytes of RAM that can be had now: those that are free or hold cached files, such as the checkpoint
    that was just read, and no more than the limits of the container or service leave, if it has some."""
    free = 1024 * _numbers(meminfo)["MemAvailable:"]
    for folder in (*folders_v2(), *folders_v1("memory")) if cgroups is None else cgroups:
        for most, used, cached in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),  # v1
        ):
            limit = folder / most
            if limit.is_file() and (limit_bytes := limit.read_text().strip()) != "max":
                taken = int((folder / used).read_text()) - _numbers(folder / "memory.stat")[cached]
                free = min(free, max(0, int(limit_bytes) - taken))
    return free


def most_memory(meminfo: Path = Path("/proc/meminfo"), cgroups: Sequence[Path] | None = None) -> int:
    """Returns the bytes that this process can have at most, swap included, within the limits of the container or
    service: all that no program holds by now. Caches of every kind count as free, however much they are used: the
    system gives them up before it ends a program."""
    machine = _numbers(meminfo)
    most = 1024 * (machine["MemTotal:"] - _sum(machine, "AnonPages:", "Shmem:"))
    for folder in (*folders_v2(), *folders_v1("memory")) if cgroups is None else cgroups:
        for limit_name, held in (
            ("memory.max", ("anon", "shmem")),
            ("memory.limit_in_bytes", ("total_rss", "total_shmem")),  # v1
        ):
            limit = folder / limit_name
            if limit.is_file() and (limit_bytes := limit.read_text().strip()) != "max":
                most = min(most, int(limit_bytes) - _sum(_numbers(folder / "memory.stat"), *held))
    return max(0, most) + 1024 * _sum(machine, "SwapFree:")


def _numbers(path: Path) -> dict[str, int]:
    """Returns the numbers of a kernel's file with a name and a number on each line."""
    return {name: int(number) for name, number, *_ in map(str.split, path.read_text().splitlines())}


def _sum(numbers: Mapping[str, int], *names: str) -> int:
    """Adds up the numbers of these names, of which not all systems have every one."""
    return sum(numbers.get(name, 0) for name in names)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.is_file() else []


def _folders(root: Path, own: str) -> list[Path]:
    """Returns the folders of the cgroup `own` and of those around it up to `root`."""
    steps = Path(own).parts
    if ".." in steps:  # it lies outside of what can be seen from here
        steps = ()
    return [root.joinpath(*steps[:depth]) for depth in range(len(steps), -1, -1)]


def _quota(folder: Path) -> tuple[int, int]:
    """Returns how many microseconds of CPU time a cgroup may use in a period, 0 or less if there is no limit, and the
    period."""
    v2, v1 = folder / "cpu.max", folder / "cpu.cfs_quota_us"
    if v2.is_file():
        limit, period = v2.read_text().split()
        return (0 if limit == "max" else int(limit)), int(period)
    if v1.is_file():
        return int(v1.read_text()), int((folder / "cpu.cfs_period_us").read_text())
    return 0, 1
