"""Records of requests, made by hand."""

from kvrelay.bench.base import Failure, RequestRecord


def record(
    *arrivals: float,
    sent: float = 0.0,
    kind: str = "",
    index: int = 0,
    wanted: int | None = None,
    cached: int | None = None,
    failure: Failure | None = None,
) -> RequestRecord:
    """Returns a request of five prompt tokens with one output token per arrival."""
    return RequestRecord(
        index=index,
        kind=kind,
        scheduled=0.0,
        sent=sent,
        arrivals=arrivals,
        finished=arrivals[-1] if arrivals else sent,
        num_prompt_tokens=5,
        num_output_tokens=len(arrivals),
        num_wanted_tokens=len(arrivals) if wanted is None else wanted,
        counted_by="usage",
        num_cached_tokens=cached,
        failure=failure,
    )
