"""`kvrelay bench serve|latency|throughput|sweep`: settings in, a table out, and files where they were asked for."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from kvrelay.bench.base import Client, Generation
from kvrelay.bench.plan import Plan, plan_latency, plan_serve, plan_warmup, plan_workload
from kvrelay.bench.prompts import PromptBuilder, Vocabulary
from kvrelay.bench.report import render, render_sweep
from kvrelay.bench.result import RunResult, write_results
from kvrelay.bench.run import Runner
from kvrelay.bench.settings import (
    GRPC_SCHEME,
    BenchSettings,
    LatencyBenchSettings,
    ServeBenchSettings,
    SweepBenchSettings,
    ThroughputBenchSettings,
)
from kvrelay.core.clock import Clock, MonotonicClock
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

Command = Callable[[Sequence[str]], int]


def bench(argv: Sequence[str]) -> int:
    """The exit status: 0 when every request ended well, 1 when one failed or nothing could be measured."""
    if not argv or argv[0] in ("--help", "-h", "help"):
        print(USAGE, end="")
        return 0 if argv else 2
    commands: dict[str, Command] = {"serve": _serve, "latency": _latency, "throughput": _throughput, "sweep": _sweep}
    if argv[0] not in commands:
        print(
            f"kvrelay bench: there is no command {argv[0]!r}; there are {', '.join(commands)}. "
            "Try `kvrelay bench --help`.",
            file=sys.stderr,
        )
        return 2
    try:
        return commands[argv[0]](argv[1:])
    except KVRelayError as error:
        print(f"kvrelay bench: {error}", file=sys.stderr)
        return 1


def _serve(argv: Sequence[str]) -> int:
    settings = load_settings(ServeBenchSettings, argv, prog="kvrelay bench serve")
    return _run("serve", settings, lambda: [plan_serve(settings)])


def _latency(argv: Sequence[str]) -> int:
    settings = load_settings(LatencyBenchSettings, argv, prog="kvrelay bench latency")
    return _run("latency", settings, lambda: [plan_latency(settings)])


def _throughput(argv: Sequence[str]) -> int:
    settings = load_settings(ThroughputBenchSettings, argv, prog="kvrelay bench throughput")
    return _run("throughput", settings, lambda: [plan_workload(settings, max_concurrency=settings.concurrency)])


def _sweep(argv: Sequence[str]) -> int:
    settings = load_settings(SweepBenchSettings, argv, prog="kvrelay bench sweep")
    rates = [
        plan_workload(settings, rate=rate, burstiness=settings.burstiness, label=f"{rate:g}/s")
        for rate in settings.request_rates
    ]
    widths = [
        plan_workload(settings, max_concurrency=width, label=f"{width} at a time") for width in settings.concurrencies
    ]
    return _run("sweep", settings, lambda: [*rates, *widths])


def _run(command: str, settings: BenchSettings, plans: Callable[[], Sequence[Plan]]) -> int:
    if not settings.is_grpc:
        require_extra("bench", ["aiohttp"], purpose="kvrelay bench over HTTP")
    if settings.plot is not None:
        require_extra("bench", ["matplotlib"], purpose="--plot")
    model, results = asyncio.run(measure(settings, plans()))
    _print(settings, results)
    if settings.json_file is not None:
        write_results(settings.json_file, command, model, settings, results)
    if settings.plot is not None:
        _plot(settings, model, results)
    if any(result.was_cut for result in results):
        return INTERRUPTED
    return 1 if any(result.summary.num_failed or not result.summary.num_completed for result in results) else 0


async def measure(settings: BenchSettings, plans: Sequence[Plan]) -> tuple[str, list[RunResult]]:
    """The model's name and a result per plan; fewer when interrupted. Raises KVRelayError when nothing can be
    measured."""
    clock = MonotonicClock()
    async with _client(settings, clock) as client:
        model = await client.resolve_model(settings.model)
        builder = PromptBuilder(_vocabulary(settings, model), settings.effective_prompt_format, seed=settings.seed)
        interrupted = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, interrupted.set)
        progress = settings.progress == "on" or (settings.progress == "auto" and sys.stderr.isatty())
        runner = Runner(client, builder, clock, settings.slos, interrupted, progress)
        try:
            await runner.warm_up(plan_warmup(settings))
            results: list[RunResult] = []
            for plan in plans:
                results.append(await runner.measure(plan))
                if interrupted.is_set():
                    break
        finally:
            loop.remove_signal_handler(signal.SIGINT)
    return model, results


def knee(results: Sequence[RunResult], attainment: float) -> RunResult | None:
    """The run of most output tokens per second among those that meet the SLOs often enough."""
    enough = [r for r in results if r.summary.goodput is not None and r.summary.goodput.attainment >= attainment]
    return max(enough, key=lambda result: result.summary.output_tokens_per_second, default=None)


@asynccontextmanager
async def _client(settings: BenchSettings, clock: Clock) -> AsyncIterator[Client]:
    generation = Generation(settings.temperature, settings.ignore_eos, settings.timeout)
    client: Client
    if settings.is_grpc:
        from kvrelay.bench.grpc_client import GrpcClient

        client = GrpcClient(settings.url.removeprefix(GRPC_SCHEME), generation, clock)
    else:
        from kvrelay.bench.openai_client import OpenAIClient  # aiohttp is an extra

        key = settings.api_key.get_secret_value()
        client = OpenAIClient(settings.url, settings.endpoint, generation, clock, api_key=key)
    try:
        yield client
    finally:
        await client.close()


def _vocabulary(settings: BenchSettings, model: str) -> Vocabulary:
    if settings.vocab_size is not None:
        return Vocabulary.of_size(settings.vocab_size)
    return Vocabulary.of_tokenizer(settings.tokenizer or model)


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
