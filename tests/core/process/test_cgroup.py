"""The limits of containers and services, as Linux shows them to the processes in them."""

import os
from pathlib import Path

import pytest

from kvrelay.core.process.cgroup import available_cores, folders_v1, folders_v2, free_memory, most_memory

GIB = 1 << 30


@pytest.mark.parametrize(
    ("membership", "folders"),
    [
        ("0::/\n", ["."]),  # a container
        ("0::/system.slice/kvrelay.service\n", ["system.slice/kvrelay.service", "system.slice", "."]),
        ("4:memory:/a\n0::/b\n", ["b", "."]),  # version 1 beside version 2
        ("4:memory:/a\n", ["."]),
        ("0::/../../other\n", ["."]),  # the process was moved out of the namespace's root
        ("", ["."]),
    ],
)
def test_the_limits_of_the_own_cgroup_and_of_all_around_it_hold(
    tmp_path: Path, membership: str, folders: list[str]
) -> None:
    (tmp_path / "cgroup").write_text(membership)
    assert folders_v2(tmp_path, tmp_path / "cgroup") == [tmp_path / folder for folder in folders]
    assert folders_v2(tmp_path, tmp_path / "nothing") == [tmp_path]


@pytest.mark.parametrize(
    ("quotas", "cores"),
    [(["max 100000"], None), (["50000 100000"], 1), (["max 100000", "100000 100000"], 1), ([], None)],
)
def test_the_smallest_quota_limits_the_cores(tmp_path: Path, quotas: list[str], cores: int | None) -> None:
    folders = [tmp_path / str(number) for number in range(len(quotas))]
    for folder, quota in zip(folders, quotas, strict=True):
        folder.mkdir()
        (folder / "cpu.max").write_text(f"{quota}\n")
    assert available_cores(folders) == (cores or len(os.sched_getaffinity(0)))


MOUNTS = """\
23 1 0:20 / /sys rw - sysfs sysfs rw
31 23 0:28 / {sys}/unified rw - cgroup2 cgroup2 rw
32 23 0:29 / {sys}/cpuset rw shared:9 - cgroup cgroup rw,cpuset
33 23 0:30 {root} {sys}/cpu,cpuacct rw,nosuid shared:10 master:2 - cgroup cgroup rw,cpu,cpuacct
34 23 0:31 {root} {sys}/memory rw,nosuid shared:11 master:2 - cgroup cgroup rw,memory
"""


@pytest.mark.parametrize(
    ("membership", "root", "folders"),
    [
        ("4:{}:/system.slice/a.service\n0::/\n", "/", ["system.slice/a.service", "system.slice", "."]),
        ("4:{}:/docker/1234\n", "/docker/1234", ["."]),  # a container of Docker
        ("4:{}:/docker/1234/a:b\n", "/docker/1234", ["a:b", "."]),
        ("4:{}:/\n", "/docker/1234", ["."]),  # a namespace of cgroups that is younger than the mount
        ("4:{}:/../../other\n", "/", ["."]),
        ("5:cpuset:/a\n", "/", ["."]),
    ],
)
def test_version_1_limits_cpu_time_and_memory_in_hierarchies_of_their_own(
    tmp_path: Path, membership: str, root: str, folders: list[str]
) -> None:
    (tmp_path / "mounts").write_text(MOUNTS.format(sys=tmp_path, root=root))
    for controller, hierarchy in (("cpu", "cpu,cpuacct"), ("memory", "memory")):
        (tmp_path / "cgroup").write_text(membership.format(hierarchy))
        found = [tmp_path / hierarchy / folder for folder in folders]
        assert folders_v1(controller, tmp_path / "cgroup", tmp_path / "mounts") == found
        assert folders_v1(controller, tmp_path / "cgroup", tmp_path / "nothing") == []


@pytest.mark.parametrize(
    ("quotas", "cores"), [((-1, -1), None), ((150000, -1), 1), ((-1, 50000), 1), ((900000000, -1), None)]
)
def test_the_smallest_quota_of_version_1_limits_the_cores(
    tmp_path: Path, quotas: tuple[int, int], cores: int | None
) -> None:
    for folder, quota in zip((tmp_path / "own", tmp_path), quotas, strict=True):
        folder.mkdir(exist_ok=True)
        (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert available_cores([tmp_path / "own", tmp_path]) == (cores or len(os.sched_getaffinity(0)))


def test_no_more_cores_are_available_than_the_process_may_use() -> None:
    assert 1 <= available_cores() <= len(os.sched_getaffinity(0))


def test_memory_that_holds_cached_files_counts_as_free(tmp_path: Path) -> None:
    """Otherwise a node that starts again, with its checkpoint still in the cache, would get a smaller pool."""
    (tmp_path / "meminfo").write_text("MemTotal: 67108864 kB\nMemFree: 524288 kB\nMemAvailable: 33554432 kB\n")
    assert free_memory(tmp_path / "meminfo", [tmp_path]) == 32 * GIB
    assert free_memory() > 0


def test_a_container_has_no_more_memory_than_its_limit_leaves(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemAvailable: 33554432 kB\n")
    (tmp_path / "memory.current").write_text(f"{3 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon {GIB}\nfile {2 * GIB}\ninactive_file {GIB}\n")
    for limit, free in ((f"{8 * GIB}", 6 * GIB), (f"{GIB}", 0), ("max", 32 * GIB)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert free_memory(tmp_path / "meminfo", [tmp_path]) == free


def test_so_it_is_in_version_1(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemAvailable: 33554432 kB\n")
    (tmp_path / "memory.usage_in_bytes").write_text(f"{3 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"cache {GIB}\ninactive_file 0\ntotal_inactive_file {GIB}\n")
    for limit, free in ((8 * GIB, 6 * GIB), (GIB, 0), (2**63 - 4096, 32 * GIB)):
        (tmp_path / "memory.limit_in_bytes").write_text(f"{limit}\n")
        assert free_memory(tmp_path / "meminfo", [tmp_path]) == free


MACHINE = "MemTotal: 67108864 kB\nMemAvailable: 1048576 kB\nAnonPages: 8388608 kB\nShmem: 8388608 kB\nSwapFree: {} kB\n"


def test_at_most_all_memory_can_be_had_that_no_program_holds(tmp_path: Path) -> None:
    """Caches are given up, whatever Linux calls available."""
    (tmp_path / "meminfo").write_text(MACHINE.format(2 << 20))
    assert most_memory(tmp_path / "meminfo", []) == (64 - 8 - 8 + 2) * GIB
    assert most_memory() >= free_memory() // 2 > 0


@pytest.mark.parametrize(
    ("limit_name", "prefix"), [("memory.max", ""), ("memory.limit_in_bytes", "total_")], ids=["version 2", "version 1"]
)
def test_in_a_container_it_is_what_its_programs_leave_of_the_limit(
    tmp_path: Path, limit_name: str, prefix: str
) -> None:
    (tmp_path / "meminfo").write_text(MACHINE.format(0))
    used = {"active_file": 4, "inactive_file": 2, "anon" if not prefix else "rss": 3, "shmem": 1}
    (tmp_path / "memory.stat").write_text("".join(f"{prefix}{name} {gib * GIB}\n" for name, gib in used.items()))
    for limit, most in ((f"{10 * GIB}", 6 * GIB), (f"{GIB}", 0), (f"{2**63 - 4096}", 48 * GIB)):
        (tmp_path / limit_name).write_text(f"{limit}\n")
        assert most_memory(tmp_path / "meminfo", [tmp_path]) == most
