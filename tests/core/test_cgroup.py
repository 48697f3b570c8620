"""The limits of containers and services, as Linux shows them to the processes in them."""

import os
from pathlib import Path

import pytest

from kvrelay.core.cgroup import available_cores, cgroup_folders


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


def test_no_more_cores_are_available_than_the_process_may_use() -> None:
    assert 1 <= available_cores() <= len(os.sched_getaffinity(0))
