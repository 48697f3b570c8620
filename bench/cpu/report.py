"""Results of the suite: a file to which each measurement is written when it has ended, and a table of several files.

The file is JSON lines, one for each measurement. Invariant: of those with the same name the last one counts.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.cpu.targets import MEASUREMENTS, Target

_BEGINNING = '{"measurement": '  # of a line
_SYMBOLS = {True: "✓", False: "✗", None: "?"}


@dataclass(frozen=True, slots=True)
class Values:
    """A figure by its name, with a value for each round. With `ours` and `theirs`, the medians of two engines, these
    values are the ratios of the rounds, and `unit` is that of the medians. `is_flawed` tells that a run of which they
    are has flaws."""

    name: str
    values: tuple[float, ...]
    unit: str = ""
    ours: float | None = None
    theirs: float | None = None
    is_flawed: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """One measurement, as it was made. `commit` ends with + if files had been changed since. `environment` is the
    machine; its `loop_ns` says how fast that was before (`bench/python_speed.py`). `problem` says why figures are
    missing, and is empty if none are. `peer` has the packages and options of the other engine, if there is one. `flaws`
    are those of its runs, which each names."""

    measurement: str
    commands: tuple[str, ...]
    commit: str
    environment: Mapping[str, object]
    figures: tuple[Values, ...]
    problem: str = ""
    peer: Mapping[str, Sequence[str]] = field(default_factory=dict)
    flaws: tuple[str, ...] = ()


def add_result(path: Path, result: Result) -> None:
    """Appends a result to a file of results, in place of a last line that is torn."""
    with path.open("a+", encoding="utf-8") as file:
        file.seek(0)
        before = file.read()
        last = before.rpartition("\n")[2]
        if _is_torn(last):
            file.truncate(len(before.removesuffix(last).encode()))
        elif last:
            file.write("\n")
        file.write(json.dumps(asdict(result)) + "\n")


def read_results(path: Path) -> dict[str, Result]:
    """Returns the results of a file by measurement, without one that is torn: whoever wrote it was killed meanwhile.
    Raises OSError when the file cannot be read, and ValueError when it has something else."""
    found: dict[str, Result] = {}
    *lines, last = path.read_text(encoding="utf-8").split("\n")
    if not _is_torn(last):
        lines.append(last)
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            figures = tuple(Values(**{**one, "values": tuple(one["values"])}) for one in entry.pop("figures"))
            tuples = {"commands": tuple(entry["commands"]), "flaws": tuple(entry.get("flaws", ()))}
            result = Result(**{**entry, **tuples}, figures=figures)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"line {number} of {path} is no result of the suite") from error
        found[result.measurement] = result
    return found


def _is_torn(line: str) -> bool:
    """Tells whether a line is the beginning of a result, or nothing, and not all of one."""
    if not (_BEGINNING.startswith(line) or line.startswith(_BEGINNING)):
        return False
    try:
        json.loads(line)
    except ValueError:
        return True
    return False


def verdict(target: Target, values: Sequence[float]) -> bool | None:
    """Tells whether a target was met: in all rounds, in none, or only in some (None)."""
    met = {target.is_met(value) for value in values}
    return met.pop() if len(met) == 1 else None


def report(columns: Mapping[str, Mapping[str, Result]]) -> str:
    """Returns a table in Markdown, with a line for each figure and a column for the results of each file, and below it
    where they come from, what failed or is flawed, and what none of the files has."""
    missing = [one.name for one in MEASUREMENTS if not any(one.name in results for results in columns.values())]
    lines = [f"| measurement | figure | target | {' | '.join(columns)} |", "|---|---|---|" + "---|" * len(columns)]
    for measurement in MEASUREMENTS:
        if measurement.name in missing:
            continue
        for index, target in enumerate(measurement.targets):
            cells = [_cell(target, results.get(measurement.name)) for results in columns.values()]
            name = "" if index else measurement.name
            lines.append(f"| {name} | {target.figure} | {target} | {' | '.join(cells)} |")
    lines.append("\n✓: the target was met in all rounds, ✗: in none, ?: in some, !: a run has a flaw, named below")
    for name, results in columns.items():
        lines += [f"{name}: {origin}" for origin in dict.fromkeys(map(_origin, results.values()))]
        turns = [float(str(one.environment["loop_ns"])) for one in results.values() if "loop_ns" in one.environment]
        if turns:
            lines.append(f"{name}: a turn of a Python loop took {min(turns):.0f} to {max(turns):.0f} ns")
        lines += [f"{name}: {one.measurement}: {one.problem}" for one in results.values() if one.problem]
        lines += [f"{name}: {one.measurement}: {flaw}" for one in results.values() for flaw in one.flaws]
    return "\n".join([*lines, *([f"not measured: {', '.join(missing)}"] if missing else [])])


def medians(results: Mapping[str, Result]) -> str:
    """Returns a table in Markdown of what both engines reached in the comparisons of one file; nothing if there are
    none."""
    lines = []
    for measurement in MEASUREMENTS:
        result = results.get(measurement.name)
        for figure in result.figures if result else ():
            if figure.ours is not None and figure.theirs is not None:
                ours, theirs = _number(figure.ours), _number(figure.theirs)
                lines.append(f"| {measurement.name} | {figure.name} | {ours} | {theirs} | {figure.unit} |")
    return "\n".join(
        ["| comparison | figure | kvrelay | peer | unit |", "|---|---|---|---|---|", *lines] if lines else []
    )


def _origin(result: Result) -> str:
    here = result.environment
    date = str(here["time"]).partition("T")[0]
    return f"{here['processor']} ({here['products']}), {here['cores']} cores, commit {result.commit}, {date}"


def _cell(target: Target, result: Result | None) -> str:
    """Returns the median with its verdict, and what the rounds gave if there are several. Empty: not measured."""
    values = next((one for one in result.figures if one.name == target.figure), None) if result else None
    if values is None or not values.values:
        return ""
    unit = values.unit if values.ours is None else ""
    shown = f"{_number(statistics.median(values.values))} {unit}".strip()
    if str(target):
        shown += f" {_SYMBOLS[verdict(target, values.values)]}"
    if values.is_flawed:
        shown += " !"
    if len(values.values) == 1:
        return shown
    least, greatest = _number(min(values.values)), _number(max(values.values))
    return f"{shown} ({least} to {greatest}, {len(values.values)})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
