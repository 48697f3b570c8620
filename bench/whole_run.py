"""A load that counts only as a whole: with a failure, or cut off, it has no result. Lesser flaws are told."""

import asyncio

from kvrelay.bench.measure import measure
from kvrelay.bench.result import LATE_SECONDS, RunResult
from kvrelay.bench.settings import BenchSettings
from kvrelay.core.errors import UnavailableError


def whole_run(settings: BenchSettings) -> RunResult:
    """Returns the result of a load, and prints its flaws. Raises UnavailableError when a request fails,
    KeyboardInterrupt after Ctrl-C."""
    _, [result] = asyncio.run(measure(settings))
    if result.was_cut:
        raise KeyboardInterrupt
    for failure in result.summary.failures:
        raise UnavailableError(f"{failure.count} requests failed: {failure.kind}: {failure.first_message}")
    if flaws := flaws_of(result):
        print(f"these figures are not those of the load that was asked for: {', '.join(flaws)}", flush=True)
    return result


def flaws_of(result: RunResult) -> tuple[str, ...]:
    """Returns the flaws of a run, a stall of the client among them that lasted longer than LATE_SECONDS."""
    has_stalled = result.longest_stall > LATE_SECONDS
    stall = (f"client stalled for {result.longest_stall * 1e3:.0f} ms",) if has_stalled else ()
    return (*result.flaws, *stall)
