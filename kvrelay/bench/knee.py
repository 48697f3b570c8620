"""The knee of a sweep: the highest load that a server bears."""

from collections.abc import Sequence

from kvrelay.bench.result import RunResult


def find_knee(results: Sequence[RunResult], attainment: float) -> RunResult | None:
    """Returns the load with the most output tokens per second among those of which a share of at least `attainment` of
    the requests meets the SLOs, or None if there is none. Loads whose figures are not valid are left out, and so is
    that of all requests at once beside loads that arrive at a rate: no server bears it for longer than its run.
    """
    at_rates = [result for result in results if result.offered is not None]
    enough = [
        result
        for result in at_rates or results
        if not result.flaws and result.summary.goodput is not None and result.summary.goodput.attainment >= attainment
    ]
    return max(enough, key=lambda result: result.summary.output_tokens_per_second, default=None)
