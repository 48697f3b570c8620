"""The limits of containers and services, as Linux shows them to the processes in them."""

import os
from pathlib import Path

import pytest

from kvrelay.core.cgroup import available_cores, cgroup_folders, cpu_folders_v1


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
    assert cgroup_folders(tmp_path, tmp_path / "cgroup") == [tmp_path / folder for folder in folders]
    assert cgroup_folders(tmp_path, tmp_path / "nothing") == [tmp_path]


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
"""


@pytest.mark.parametrize(
    ("membership", "root", "folders"),
    [
        ("4:cpuacct,cpu:/system.slice/a.service\n0::/\n", "/", ["system.slice/a.service", "system.slice", "."]),
        ("4:cpu,cpuacct:/docker/1234\n", "/docker/1234", ["."]),  # a container of Docker
        ("4:cpu,cpuacct:/docker/1234/a:b\n", "/docker/1234", ["a:b", "."]),
        ("4:cpu,cpuacct:/\n", "/docker/1234", ["."]),  # a namespace of cgroups that is younger than the mount
        ("4:cpu,cpuacct:/../../other\n", "/", ["."]),
        ("5:cpuset:/a\n", "/", ["."]),
    ],
)
def test_version_1_limits_cpu_time_in_a_hierarchy_of_its_own(
    tmp_path: Path, membership: str, root: str, folders: list[str]
) -> None:
    (tmp_path / "cgroup").write_text(membership)
    (tmp_path / "mounts").write_text(MOUNTS.format(sys=tmp_path, root=root))
    found = [tmp_path / "cpu,cpuacct" / folder for folder in folders]
    assert cpu_folders_v1(tmp_path / "cgroup", tmp_path / "mounts") == found
    assert cpu_folders_v1(tmp_path / "cgroup", tmp_path / "nothing") == []


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
