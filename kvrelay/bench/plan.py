"""From settings to the plan of a run: its sessions, its warm-up, and how many requests run at a time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvrelay.bench.arrivals import gamma_arrivals
from kvrelay.bench.base import RequestSpec
from kvrelay.bench.dataset import read_dataset, warmup_of
from kvrelay.bench.settings import (
    BenchSettings,
    LatencyBenchSettings,
    ServeBenchSettings,
    SweepBenchSettings,
    ThroughputBenchSettings,
    WorkloadSettings,
)
from kvrelay.bench.trace import read_trace
from kvrelay.bench.workloads import (
    Lengths,
    MixedLoad,
    Session,
    arriving,
    conversation_turns,
    random_requests,
    shared_prefix_requests,
)


@dataclass(frozen=True, slots=True)
class Plan:
    """One run. `num_requests` is None when time ends it; throughput is then counted over `window` seconds.
    `request_rate` is the one that was asked for, inf for all at once, None for a trace's own times. `label` names the
    run among those of a sweep."""

    sessions: Sequence[Session]
    num_requests: int | None
    max_concurrency: int | None = None
    window: float | None = None
    request_rate: float | None = None
    label: str = ""


def plans_of(settings: BenchSettings) -> list[Plan]:
    """Returns the runs of a command. Raises ConfigurationError when a file of requests cannot be read."""
    match settings:
        case ServeBenchSettings():
            return [_plan_serve(settings)]
        case LatencyBenchSettings():
            return [_plan_latency(settings)]
        case ThroughputBenchSettings():
            return [_plan_workload(settings, max_concurrency=settings.concurrency)]
        case SweepBenchSettings():
            return _plan_sweep(settings)
    raise TypeError(f"no plan for {type(settings).__name__}")


def plan_warmup(settings: BenchSettings, measured: Plan) -> Plan:
    """Returns requests like the measured ones, to be sent one by one, that share no prefix with them."""
    if not settings.draws_prompts:
        given = [request for session in measured.sessions for request in session.requests]
        return _one_by_one(warmup_of(given, settings.warmup))
    requests = random_requests(settings.warmup, *_warmup_lengths(settings, measured), seed=settings.seed)
    return _one_by_one(_renamed(requests, "warm-up"))


def _warmup_lengths(settings: BenchSettings, measured: Plan) -> tuple[Lengths, Lengths]:
    """Returns the lengths of a trace's first request, elsewhere those that the settings say."""
    if not isinstance(settings, ServeBenchSettings) or settings.workload != "trace":
        return _lengths(settings)
    [request] = measured.sessions[0].requests  # a trace may be a pipe, which can be read only once
    prompt = sum(segment.length for segment in request.segments)
    return Lengths(prompt, prompt), Lengths(request.max_tokens, request.max_tokens)


def _plan_serve(settings: ServeBenchSettings) -> Plan:
    if settings.workload == "trace":
        assert settings.trace is not None
        sessions = read_trace(settings.trace, speedup=settings.speedup, limit=settings.limit)
        return Plan(sessions, len(sessions), settings.concurrency)
    if settings.workload == "mixed":
        mixed = MixedLoad(
            streams=settings.streams,
            inputs=Lengths.parse(settings.input_len),
            outputs=Lengths.parse(settings.output_len),
            period=settings.long_every,
            duration=settings.duration,
            long_inputs=Lengths.parse(settings.long_input_len),
            long_outputs=Lengths.parse(settings.long_output_len),
        )
        return Plan(mixed.sessions(seed=settings.seed), None, window=settings.duration)
    rate = float("inf") if settings.request_rate is None else settings.request_rate
    if settings.workload == "dataset":
        assert settings.dataset is not None
        outputs = Lengths.parse(settings.output_len)
        requests = read_dataset(settings.dataset, outputs, limit=settings.limit, seed=settings.seed)
        arrivals = gamma_arrivals(rate, burstiness=settings.burstiness, seed=settings.seed)
        return Plan(arriving(requests, arrivals), len(requests), settings.concurrency, request_rate=rate)
    return _plan_workload(settings, rate=rate, burstiness=settings.burstiness, max_concurrency=settings.concurrency)


def _plan_latency(settings: BenchSettings) -> Plan:
    requests = random_requests(settings.requests, *_lengths(settings), seed=settings.seed)
    return _one_by_one(requests)


def _one_by_one(requests: Sequence[RequestSpec]) -> Plan:
    return Plan(arriving(requests, gamma_arrivals(float("inf"), seed=0)), len(requests), max_concurrency=1)


def _plan_workload(
    settings: WorkloadSettings,
    *,
    rate: float = float("inf"),
    burstiness: float = 1.0,
    max_concurrency: int | None = None,
    label: str = "",
    number: int = 0,
) -> Plan:
    """Returns a run of random, shared-prefix or multi-turn requests, at a rate and within a concurrency. Runs with
    different labels or numbers have different prompts: what a server has cached of one must not serve the next."""
    arrivals = gamma_arrivals(rate, burstiness=burstiness, seed=settings.seed)
    inputs, outputs = _lengths(settings)
    name = f"{label}/{number}" if label else ""
    if settings.workload == "multi-turn":
        turns = [
            conversation_turns(index, settings.turns, inputs, outputs, seed=settings.seed)
            for index in range(settings.requests)
        ]
        sessions = [
            Session(at, _renamed(requests, name), is_conversation=True, think_time=settings.think_time)
            for requests, at in zip(turns, arrivals, strict=False)
        ]
        return Plan(sessions, settings.requests * settings.turns, max_concurrency, request_rate=rate, label=label)
    if settings.workload == "shared-prefix":
        requests = shared_prefix_requests(
            settings.requests, settings.num_prefixes, settings.prefix_len, inputs, outputs, seed=settings.seed
        )
    else:
        requests = random_requests(settings.requests, inputs, outputs, seed=settings.seed)
    sessions = arriving(_renamed(requests, name), arrivals)
    return Plan(sessions, len(requests), max_concurrency, request_rate=rate, label=label)


def _plan_sweep(settings: SweepBenchSettings) -> list[Plan]:
    rates = [
        _plan_workload(settings, rate=rate, burstiness=settings.burstiness, label=f"{rate:g}/s", number=number)
        for number, rate in enumerate(settings.request_rates, start=1)
    ]
    widths = [
        _plan_workload(settings, max_concurrency=width, label=f"{width} at a time", number=number)
        for number, width in enumerate(settings.concurrencies, start=1)
    ]
    return [*rates, *widths]


def _lengths(settings: BenchSettings) -> tuple[Lengths, Lengths]:
    return Lengths.parse(settings.input_len), Lengths.parse(settings.output_len)


def _renamed(requests: Sequence[RequestSpec], name: str) -> list[RequestSpec]:
    """Returns the requests with segments of other names, unless `name` is empty."""
    if not name:
        return list(requests)
    return [
        replace(request, segments=tuple(replace(part, name=f"{name}/{part.name}") for part in request.segments))
        for request in requests
    ]
