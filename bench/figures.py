"""The figures of a benchmark script as a file, from which `bench.cpu_suite` reads them."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Figure:
    """What a script has measured: a median where it measures several times. Ratios have no unit."""

    name: str
    value: float
    unit: str = ""


def add_json_file(parser: argparse.ArgumentParser) -> None:
    """Adds the option `--json-file`, `json_file` of the parsed arguments: a path, or None."""
    parser.add_argument("--json-file", type=Path, help="also write the figures here, as JSON")


def write_figures(path: Path | None, figures: Sequence[Figure]) -> None:
    """Writes the figures, or nothing if `path` is None."""
    if path is not None:
        path.write_text(json.dumps([asdict(figure) for figure in figures], indent=2) + "\n")


def read_figures(path: Path) -> list[Figure]:
    """Returns what `write_figures` has written."""
    return [Figure(**entry) for entry in json.loads(path.read_text())]
