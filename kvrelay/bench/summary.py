"""The figures of a run, from the records of its requests: percentiles, throughput, goodput, failures by kind.

Only requests that ended well have latencies. Throughput counts every token that came, from the first request sent to
the last token, or to the end of a request that failed, since a server that hangs has had that time; with a window only
what came within it. Percentiles interpolate linearly, as numpy does by default.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvrelay.bench.base import CANCELLED, RequestRecord
from kvrelay.bench.slo import Slos

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Statistics of a latency, in seconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Distribution | None":
        """Returns None without values."""
        array = np.fromiter(values, np.float64)
        if not array.size:
            return None
        p50, p90, p95, p99 = (float(value) for value in np.percentile(array, PERCENTILES))
        return cls(int(array.size), float(array.mean()), p50, p90, p95, p99, float(array.max()))


@dataclass(frozen=True, slots=True)
class FailureCount:
    kind: str
    count: int
    first_message: str


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that meet every SLO: how many per second, and `attainment`, their share of all requests except those
    that the end of the run cut off."""

    requests_per_second: float
    attainment: float


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one run, or of its requests of one kind."""

    num_completed: int
    num_within: int  # of these, within `seconds`: others ended after the window
    num_failed: int
    num_cancelled: int
    num_short: int  # ended well with fewer tokens than asked for
    seconds: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None  # None where the server does not count them
    counted_by: Literal["usage", "chunks", "usage and chunks"]
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    mean_running: float  # requests at a time
    ttft: Distribution | None
    itl: Distribution | None
    tpot: Distribution | None
    e2e: Distribution | None
    merged_share: float  # of the gaps between pieces, those that are 0 because both came in one read
    goodput: Goodput | None
    failures: tuple[FailureCount, ...]
    latest_start: float  # most seconds that a request was sent after it could be


def summarise(records: Sequence[RequestRecord], *, slos: Slos | None = None, window: float | None = None) -> Summary:
    """Returns the figures of these records. With `window`, throughput counts exactly the first so many seconds."""
    good = [record for record in records if record.failure is None]
    cancelled = [record for record in records if record.failure is not None and record.failure.kind == CANCELLED]
    begin = 0.0 if window is not None else min((record.sent for record in records), default=0.0)
    end = max((record.arrivals[-1] if record.failure is None else record.finished for record in records), default=0.0)
    end = end if window is None else window
    seconds = max(end - begin, 1e-9)
    within = [record for record in good if record.arrivals[-1] <= end]
    output_tokens = sum(_tokens_until(record, end) for record in records)
    prompt_tokens = sum(record.num_prompt_tokens for record in records if record.arrivals and record.arrivals[0] <= end)
    itls = np.fromiter((itl for record in good for itl in record.itls), np.float64)
    return Summary(
        num_completed=len(good),
        num_within=len(within),
        num_failed=len(records) - len(good) - len(cancelled),
        num_cancelled=len(cancelled),
        num_short=sum(record.was_short for record in records),
        seconds=seconds,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        cached_tokens=_cached_tokens(good),
        counted_by=_counted_by(records),
        requests_per_second=len(within) / seconds,
        output_tokens_per_second=output_tokens / seconds,
        total_tokens_per_second=(output_tokens + prompt_tokens) / seconds,
        mean_running=sum(max(0.0, min(record.finished, end) - record.sent) for record in records) / seconds,
        ttft=Distribution.of(record.ttft for record in good),
        itl=Distribution.of(itls),
        tpot=Distribution.of(record.tpot for record in good if record.tpot is not None),
        e2e=Distribution.of(record.e2e for record in good),
        merged_share=float(np.mean(itls == 0.0)) if itls.size else 0.0,
        goodput=None if slos is None else _goodput(records, within, slos, seconds, len(cancelled)),
        failures=count_failures(records),
        latest_start=max((record.sent - record.due for record in records), default=0.0),
    )


def summaries_by_kind(
    records: Sequence[RequestRecord], *, slos: Slos | None = None, window: float | None = None
) -> dict[str, Summary]:
    """Returns a summary for each kind of request, none when all are of one kind."""
    kinds = list(dict.fromkeys(record.kind for record in sorted(records, key=lambda record: record.index)))
    if len(kinds) < 2:
        return {}
    return {
        kind: summarise([record for record in records if record.kind == kind], slos=slos, window=window)
        for kind in kinds
    }


def count_failures(records: Sequence[RequestRecord]) -> tuple[FailureCount, ...]:
    """Counts failures by kind, the most frequent first, each with its first message."""
    failures = [record.failure for record in records if record.failure is not None and record.failure.kind != CANCELLED]
    first = {failure.kind: failure.message for failure in reversed(failures)}
    counts = Counter(failure.kind for failure in failures)
    return tuple(FailureCount(kind, count, first[kind]) for kind, count in counts.most_common())


def _tokens_until(record: RequestRecord, end: float) -> int:
    """Returns the tokens that came until `end`; of a request that goes on after it, the same share as of its pieces."""
    if not record.arrivals or record.arrivals[-1] <= end:
        return record.num_output_tokens
    arrived = sum(arrival <= end for arrival in record.arrivals)
    return round(record.num_output_tokens * arrived / len(record.arrivals))


def _cached_tokens(good: Sequence[RequestRecord]) -> int | None:
    counts = [record.num_cached_tokens for record in good if record.num_cached_tokens is not None]
    return sum(counts) if counts else None


def _counted_by(records: Sequence[RequestRecord]) -> Literal["usage", "chunks", "usage and chunks"]:
    ways = {record.counted_by for record in records if record.arrivals}
    return "usage and chunks" if len(ways) == 2 else "chunks" if ways == {"chunks"} else "usage"


def _goodput(
    records: Sequence[RequestRecord], within: Sequence[RequestRecord], slos: Slos, seconds: float, num_cancelled: int
) -> Goodput:
    met = sum(slos.met_by(record) for record in records)
    return Goodput(
        requests_per_second=sum(slos.met_by(record) for record in within) / seconds,
        attainment=met / max(1, len(records) - num_cancelled),
    )
