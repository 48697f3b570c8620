"""Records of requests, and runs of them, made by hand."""

from typing import Any

from kvrelay.bench.base import Failure, RequestRecord
from kvrelay.bench.result import RunResult
from kvrelay.bench.slo import Slos
from kvrelay.bench.summary import summarise


def record(
    *arrivals: float,
    scheduled: float = 0.0,
    due: float | None = None,
    sent: float = 0.0,
    finished: float | None = None,
    kind: str = "",
    index: int = 0,
    wanted: int | None = None,
    cached: int | None = None,
    failure: Failure | None = None,
) -> RequestRecord:
    """Returns a request of five prompt tokens with an output token per arrival. If nothing else is said, it could be
    sent at its time, and has finished with the last one."""
    return RequestRecord(
        index=index,
        kind=kind,
        scheduled=scheduled,
        due=scheduled if due is None else due,
        sent=sent,
        arrivals=arrivals,
        finished=(arrivals[-1] if arrivals else sent) if finished is None else finished,
        num_drawn_tokens=5,
        num_prompt_tokens=5,
        num_output_tokens=len(arrivals),
        num_wanted_tokens=len(arrivals) if wanted is None else wanted,
        counted_by="usage",
        num_cached_tokens=cached,
        failure=failure,
    )


def run_of(*records: RequestRecord, label: str = "", slos: Slos | None = None, **more: Any) -> RunResult:
    return RunResult(label, summarise(records, slos=slos), {}, records, 0.0, **more)
