"""Results of the suite: a table for people, JSON with the machine, versions and date for the record."""

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

from bench.gpu.measure import Rates


@dataclass(frozen=True, slots=True)
class Result:
    """`error`: the largest deviation from float64 as a share of what is allowed; right is 1 or less. `peers`: seconds
    of other implementations of the same work."""

    name: str
    error: float
    seconds: float
    floor_seconds: float
    peers: dict[str, float]

    @property
    def is_right(self) -> bool:
        return self.error <= 1.0


def table(results: Sequence[Result]) -> str:
    width = max(len(result.name) for result in results)
    lines = [f"{'kernel':{width}}  right  error/allowed       time      floor  of floor  against"]
    for result in results:
        peers = ", ".join(f"{name} {seconds / result.seconds:.2f}x" for name, seconds in result.peers.items())
        lines.append(
            f"{result.name:{width}}  {'yes' if result.is_right else 'NO':5}  {result.error:13.3f}"
            f"  {result.seconds * 1e6:7.1f} us  {result.floor_seconds * 1e6:6.1f} us"
            f"  {result.floor_seconds / result.seconds:8.0%}  {peers}".rstrip()
        )
    return "\n".join(lines)


def write_json(path: Path, results: Sequence[Result], rates: Rates, device: torch.device, seed: int) -> None:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.processor()} (interpreted)"
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": name,
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "triton": version("triton")},
        "cuda": torch.version.cuda,
        "seed": seed,
        "copy_bytes_per_second": rates.copy,
        "matmul_operations_per_second": rates.matmul,
        "results": [asdict(result) for result in results],
    }
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
