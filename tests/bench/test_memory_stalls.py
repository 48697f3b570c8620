"""The flaw of a measurement on a machine that is short of memory."""

from pathlib import Path

import pytest

from bench import memory_stalls
from bench.memory_stalls import MemoryStalls

# As the kernel writes it: averages in percent, and the sum in microseconds.
LINES = "some avg10=0.00 avg60=1.20 avg300=0.44 total={some}\nfull avg10=0.00 avg60=0.90 avg300=0.31 total=900\n"


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.9, ()),
        (2.5, ("the machine was short of memory: some process waited for it for 2.5 s",)),
    ],
)
def test_a_machine_short_of_memory_is_told(
    seconds: float, expected: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pressure = tmp_path / "memory"
    pressure.write_text(LINES.format(some=7_000_000))
    monkeypatch.setattr(memory_stalls, "_PRESSURE", pressure)
    stalls = MemoryStalls()
    stalls._started -= 100.0
    pressure.write_text(LINES.format(some=7_000_000 + round(seconds * 1e6)))
    assert stalls.flaws() == expected


def test_without_the_kernels_count_there_is_no_flaw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_stalls, "_PRESSURE", tmp_path / "none")
    assert MemoryStalls().flaws() == ()
