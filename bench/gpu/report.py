"""Results of the suite: a file to which each is written as soon as it is known, and a table for people.

The file is JSON lines: one for the start of a part (date, machine, versions, seed, rates), then one for each result. It
may hold any number of parts, of one run or of several. Invariant: of results with the same part and name, the last one
counts.
"""

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from bench.gpu.measure import Rates

_PACKAGES = ("torch", "triton", "transformers", "cuda-bindings")


@dataclass(frozen=True, slots=True)
class Result:
    """What one task found. `error` is the largest deviation from the right result as a share of the allowed one: 1 or
    less is right. `peers` are the seconds of other implementations of the same work, `parts` the seconds that parts of
    the work took, as far as they are known. `problem` says why there is no measurement."""

    name: str
    error: float
    seconds: float
    floor_seconds: float
    peers: Mapping[str, float] = field(default_factory=dict)
    parts: Mapping[str, float] = field(default_factory=dict)
    problem: str = ""

    @classmethod
    def failed(cls, name: str, problem: str, *, is_wrong: bool = True) -> "Result":
        return cls(name, float("inf") if is_wrong else 0.0, 0.0, 0.0, problem=problem)

    @property
    def is_right(self) -> bool:
        return self.error <= 1.0

    @property
    def of_floor(self) -> float:
        return self.floor_seconds / self.seconds if self.seconds else 0.0


class Record:
    """The results of one part, which it prints and writes. With `path` None nothing is written."""

    def __init__(self, path: Path | None, part: str) -> None:
        self._path = path
        self._part = part

    def begin(self, rates: Rates, device: torch.device, seed: int) -> None:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.processor()} (interpreted)"
        self._write(
            {
                "part": self._part,
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "device": name,
                "versions": {"python": platform.python_version()} | _versions(),
                "cuda": torch.version.cuda,
                "seed": seed,
                "copy_bytes_per_second": rates.copy,
                "matmul_operations_per_second": rates.matmul,
            }
        )

    def add(self, result: Result) -> None:
        self._write({"part": self._part, "result": asdict(result)})
        print(line(result), flush=True)

    def _write(self, entry: Mapping[str, object]) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:  # for each line: several processes write, in turn
                file.write(json.dumps(entry) + "\n")


@dataclass(frozen=True, slots=True)
class Records:
    """The content of a file. `runs` are its lines about the starts of parts."""

    runs: Sequence[Mapping[str, object]]
    results: Sequence[Result]

    @property
    def devices(self) -> frozenset[str]:
        return frozenset(str(run["device"]) for run in self.runs)


def read_records(path: Path) -> Records:
    runs: list[Mapping[str, object]] = []
    results: dict[tuple[str, str], Result] = {}
    for text in path.read_text(encoding="utf-8").splitlines():
        entry = json.loads(text)
        if "result" in entry:
            result = Result(**entry["result"])
            results[entry["part"], result.name] = result
        else:
            runs.append(entry)
            results.pop((entry["part"], entry["part"]), None)  # what kept an earlier run from its results
    return Records(runs, list(results.values()))


def line(result: Result) -> str:
    if result.problem:
        return f"{result.name:54}  {'NO' if not result.is_right else '-':3}  {result.problem}"
    peers = [f"{name} {seconds / result.seconds:.2f}x" for name, seconds in result.peers.items()]
    parts = [f"{name} {seconds * 1e6:.0f}" for name, seconds in result.parts.items()]
    text = (
        f"{result.name:54}  {'yes' if result.is_right else 'NO':3}  {result.error:13.3f}  {result.seconds * 1e6:10.1f}"
        f"  {result.floor_seconds * 1e6:10.1f}  {result.of_floor:8.0%}  {', '.join(peers)}"
    ).rstrip()
    return "\n".join([text, *(["    us: " + ", ".join(parts)] if parts else [])])


def table(results: Sequence[Result]) -> str:
    head = f"{'what':54}  ok   error/allowed     time us    floor us  of floor  time of others"
    return "\n".join([head, *map(line, results)])


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
