"""`kvrelay bench serve|latency|throughput|sweep`: from settings to a table, and to files where they are asked for."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import uvloop

from kvrelay.bench.knee import find_knee
from kvrelay.bench.measure import measure
from kvrelay.bench.output_file import check_writable
from kvrelay.bench.report import render, render_sweep
from kvrelay.bench.result import RunResult, write_results
from kvrelay.bench.settings import (
    BenchSettings,
    LatencyBenchSettings,
    ServeBenchSettings,
    SweepBenchSettings,
    ThroughputBenchSettings,
)
from kvrelay.core.config.settings import load_settings
from kvrelay.core.errors import ConfigurationError, KVRelayError
from kvrelay.core.process.extras import require_extra
from kvrelay.core.process.interruptible import INTERRUPTED
from kvrelay.core.process.lifecycle import raise_open_files_limit
from kvrelay.core.process.terminal import printable, replace_what_it_lacks

USAGE = """\
usage: kvrelay bench COMMAND ...        `kvrelay bench COMMAND --help` explains it, with examples

Measures any OpenAI-compatible server (http://), or a kvrelay router over gRPC (grpc://):
  serve         load as users make it: arrival rates, shared prefixes, conversations, mixed load, traces,
                data sets
  latency       one request at a time
  throughput    everything at once, or so many at a time
  sweep         several loads, a curve, and the highest load that meets given SLOs
"""

SETTINGS: Mapping[str, type[BenchSettings]] = {
    "serve": ServeBenchSettings,
    "latency": LatencyBenchSettings,
    "throughput": ThroughputBenchSettings,
    "sweep": SweepBenchSettings,
}


def bench(argv: Sequence[str]) -> int:
    """Runs one command line and returns its exit status: 0 when every request ended well and every file was written,
    130 after Ctrl-C or SIGTERM, 2 for an unknown command, otherwise 1."""
    if not argv or argv[0] in ("--help", "-h", "help"):
        print(USAGE, end="")
        return 0 if argv else 2
    command = argv[0]
    if command not in SETTINGS:
        print(
            f"kvrelay bench: there is no command {command!r}; there are {', '.join(SETTINGS)}. "
            "Try `kvrelay bench --help`.",
            file=sys.stderr,
        )
        return 2
    settings = load_settings(SETTINGS[command], argv[1:], prog=f"kvrelay bench {command}")
    try:
        return _run(command, settings)
    except KVRelayError as error:
        print(f"kvrelay bench: {printable(str(error))}", file=sys.stderr)
        return 1


def _run(command: str, settings: BenchSettings) -> int:
    if settings.plot is not None:
        require_extra("bench", ["matplotlib"], purpose="--plot")
        check_writable("--plot", settings.plot)
    if settings.json_file is not None:
        check_writable("--json-file", settings.json_file)
    raise_open_files_limit()  # every request that runs has a connection
    model, results = uvloop.run(measure(settings))
    was_cut = not results or any(result.was_cut for result in results)
    if was_cut and not any(result.records for result in results):
        print("kvrelay bench: interrupted before a request was measured: nothing is written", file=sys.stderr)
        return INTERRUPTED
    knee = find_knee(results, settings.attainment) if isinstance(settings, SweepBenchSettings) else None
    unwritten: list[ConfigurationError] = []
    # The last one first: the file, because nobody may read the table any more, then the table, because a plot takes
    # seconds. Each is done even if one before it fails, or is interrupted by one more Ctrl-C.
    with ExitStack() as steps:
        if settings.plot is not None:
            steps.callback(_write, partial(_plot, settings.plot, settings, model, results), unwritten)
        steps.callback(_print, settings, results, knee)
        if settings.json_file is not None:
            write = partial(write_results, settings.json_file, command, model, settings, results, knee=knee)
            steps.callback(_write, write, unwritten)
    if was_cut:
        return INTERRUPTED
    all_well = all(result.summary.num_completed and not result.summary.num_failed for result in results)
    return 0 if all_well and not unwritten else 1


def _print(settings: BenchSettings, results: Sequence[RunResult], knee: RunResult | None) -> None:
    replace_what_it_lacks()
    if isinstance(settings, SweepBenchSettings):
        print(printable(render_sweep(results, knee, settings.slos, settings.attainment)))
        return
    for result in results:
        print(printable(render(result, settings.slos)))


def _write(write: Callable[[], None], unwritten: list[ConfigurationError]) -> None:
    """Writes a file. Says and notes why it could not be."""
    try:
        write()
    except ConfigurationError as error:
        print(f"kvrelay bench: {error}", file=sys.stderr)
        unwritten.append(error)


def _plot(path: Path, settings: BenchSettings, model: str, results: Sequence[RunResult]) -> None:
    from kvrelay.bench.plot import plot_curve, plot_distributions, save_plot

    is_sweep = isinstance(settings, SweepBenchSettings)
    save_plot(plot_curve(results, model) if is_sweep else plot_distributions(results[0], model), path)
