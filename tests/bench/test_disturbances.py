"""The flaws of a measurement on a machine that is short of memory, or whose host gives its processors to others."""

import os
from pathlib import Path

import pytest

from bench import disturbances
from bench.disturbances import Disturbances

# As the kernel writes them: averages in percent and the sum in microseconds, and ticks of all processors.
PRESSURE = "some avg10=0.00 avg60=1.20 avg300=0.44 total={some}\nfull avg10=0.00 avg60=0.90 avg300=0.31 total=900\n"
STAT = "cpu  1264640 41899 150056 842120 4466 0 8124 {steal} 0 0\ncpu0 625366 23252 89596 411039 2524 0 3699 4803 0 0\n"


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of a kernel that has counted seven seconds without memory, and 9,815 stolen ticks."""
    (tmp_path / "memory").write_text(PRESSURE.format(some=7_000_000))
    (tmp_path / "stat").write_text(STAT.format(steal=9_815))
    monkeypatch.setattr(disturbances, "_PRESSURE", tmp_path / "memory")
    monkeypatch.setattr(disturbances, "_STAT", tmp_path / "stat")
    return tmp_path


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.9, ()),
        (2.5, ("the machine was short of memory: some process waited for it for 2.5 s",)),
    ],
)
def test_a_machine_short_of_memory_is_told(seconds: float, expected: tuple[str, ...], kernel: Path) -> None:
    since = Disturbances()
    since._started -= 100.0
    (kernel / "memory").write_text(PRESSURE.format(some=7_000_000 + round(seconds * 1e6)))
    assert since.flaws() == expected


@pytest.mark.parametrize(
    ("share", "expected"), [(0.04, ()), (0.08, ("the host gave 8% of the processors' time to others",))]
)
def test_stolen_time_is_told(share: float, expected: tuple[str, ...], kernel: Path) -> None:
    since = Disturbances()
    since._started -= 100.0
    stolen = share * 100.0 * (os.cpu_count() or 1) * os.sysconf("SC_CLK_TCK")
    (kernel / "stat").write_text(STAT.format(steal=9_815 + round(stolen)))
    assert since.flaws() == expected


def test_without_the_kernels_count_of_memory_there_is_no_flaw(kernel: Path) -> None:
    (kernel / "memory").unlink()
    assert Disturbances().flaws() == ()


def test_this_machine_counts() -> None:
    assert disturbances._stolen_seconds() >= 0.0
