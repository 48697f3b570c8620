"""A load that counts only as a whole: with a failure, or cut off, it has no result. Lesser flaws are told."""

import asyncio

from kvrelay.bench.measure import measure
from kvrelay.bench.result import RunResult
from kvrelay.bench.settings import BenchSettings
from kvrelay.core.errors import UnavailableError


def whole_run(settings: BenchSettings) -> RunResult:
    """Returns the result of a load, and prints its flaws. Raises UnavailableError when a request fails,
    KeyboardInterrupt after Ctrl-C."""
    _, results = asyncio.run(measure(settings))
    if not results or results[0].was_cut:
        raise KeyboardInterrupt
    [result] = results
    for failure in result.summary.failures:
        raise UnavailableError(f"{failure.count} requests failed: {failure.kind}: {failure.first_message}")
    if result.flaws:
        print(f"these figures are not those of the load that was asked for: {', '.join(result.flaws)}", flush=True)
    return result
