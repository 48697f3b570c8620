"""`kvrelay bench serve|latency|throughput|sweep`: settings in, a table out, and files where they were asked for."""

import sys
from collections.abc import Mapping, Sequence

import uvloop

from kvrelay.bench.measure import measure
from kvrelay.bench.report import render, render_sweep
from kvrelay.bench.result import RunResult, write_results
from kvrelay.bench.settings import (
    BenchSettings,
    LatencyBenchSettings,
    ServeBenchSettings,
    SweepBenchSettings,
    ThroughputBenchSettings,
)
from kvrelay.core.config import load_settings
from kvrelay.core.errors import KVRelayError
from kvrelay.core.extras import require_extra

USAGE = """\
usage: kvrelay bench COMMAND ...        `kvrelay bench COMMAND --help` explains it, with examples

Measures any OpenAI-compatible server (http://), or a kvrelay router over gRPC (grpc://):
  serve         load as users make it: arrival rates, shared prefixes, conversations, mixed load, traces
  latency       one request at a time
  throughput    everything at once, or so many at a time
  sweep         several loads, a curve, and the highest load that meets given SLOs
"""
INTERRUPTED = 130

SETTINGS: Mapping[str, type[BenchSettings]] = {
    "serve": ServeBenchSettings,
    "latency": LatencyBenchSettings,
    "throughput": ThroughputBenchSettings,
    "sweep": SweepBenchSettings,
}


def bench(argv: Sequence[str]) -> int:
    """The exit status: 0 when every request ended well, 1 when one failed or nothing could be measured."""
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
        print(f"kvrelay bench: {error}", file=sys.stderr)
        return 1


def _run(command: str, settings: BenchSettings) -> int:
    if not settings.is_grpc:
        require_extra("bench", ["aiohttp"], purpose="kvrelay bench over HTTP")
    if settings.plot is not None:
        require_extra("bench", ["matplotlib"], purpose="--plot")
    model, results = uvloop.run(measure(settings))
    _print(settings, results)
    if settings.json_file is not None:
        write_results(settings.json_file, command, model, settings, results)
    if settings.plot is not None:
        _plot(settings, model, results)
    if any(result.was_cut for result in results):
        return INTERRUPTED
    return 1 if any(result.summary.num_failed or not result.summary.num_completed for result in results) else 0


def knee(results: Sequence[RunResult], attainment: float) -> RunResult | None:
    """The run of most output tokens per second among those that meet the SLOs often enough."""
    enough = [r for r in results if r.summary.goodput is not None and r.summary.goodput.attainment >= attainment]
    return max(enough, key=lambda result: result.summary.output_tokens_per_second, default=None)


def _print(settings: BenchSettings, results: Sequence[RunResult]) -> None:
    if isinstance(settings, SweepBenchSettings):
        found = knee(results, settings.attainment)
        print(render_sweep(results, found, settings.slos, settings.attainment))
        for result in results:
            for failure in result.summary.failures:
                print(f"{result.label}: failed: {failure.count} x {failure.kind}: {failure.first_message}")
        return
    limited = isinstance(settings, LatencyBenchSettings) or getattr(settings, "concurrency", None) is not None
    for result in results:
        print(render(result, settings.slos, limited=limited))


def _plot(settings: BenchSettings, model: str, results: Sequence[RunResult]) -> None:
    from kvrelay.bench.plot import plot_curve, plot_distributions

    assert settings.plot is not None
    if isinstance(settings, SweepBenchSettings):
        plot_curve(settings.plot, results, model)
    elif results:
        plot_distributions(settings.plot, results[0], model)
