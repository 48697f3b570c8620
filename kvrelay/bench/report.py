"""Figures as text for a terminal."""

from collections.abc import Iterator, Sequence

from kvrelay.bench.result import RunResult
from kvrelay.bench.slo import Slos
from kvrelay.bench.summary import Distribution, Summary

_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")
_LATENCIES = (
    ("ttft", "TTFT"),
    ("itl", "ITL"),
    ("tpot", "TPOT"),
    ("e2e", "E2E"),
)


def render(result: RunResult, slos: Slos | None, *, limited: bool) -> str:
    """One run. `limited`: concurrency was, so that requests waited for a place on purpose."""
    parts = ["\n".join(_lines(result.summary, slos))]
    parts += [f"{kind}\n" + "\n".join(_lines(summary, slos)) for kind, summary in result.by_kind.items()]
    parts.append("\n".join(_notes(result, limited=limited)))
    return "\n\n".join(part for part in parts if part)


def render_sweep(results: Sequence[RunResult], knee: RunResult | None, slos: Slos | None, attainment: float) -> str:
    """One line per load, and the knee."""
    rows: list[Sequence[str]] = [
        ("load", "req/s", "out tok/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "meet SLOs", "failed")
    ]
    for result in results:
        summary = result.summary
        goodput = summary.goodput
        rows.append(
            (
                result.label,
                f"{summary.requests_per_second:.2f}",
                f"{summary.output_tokens_per_second:.1f}",
                *(_ms(summary.ttft, name) for name in ("p50", "p99")),
                *(_ms(summary.itl, name) for name in ("p50", "p99")),
                "-" if goodput is None else f"{goodput.attainment:.0%}",
                str(summary.num_failed),
            )
        )
    text = _table(rows)
    if slos is None:
        return text
    if knee is None:
        return f"{text}\n\nno load meets {slos} for {attainment:.0%} of its requests"
    return f"{text}\n\nthe highest load at which {attainment:.0%} of the requests meet {slos}: {knee.label}"


def _lines(summary: Summary, slos: Slos | None) -> Iterator[str]:
    cut = f", {summary.num_cancelled} cut off" if summary.num_cancelled else ""
    yield (
        f"  {summary.num_completed} requests completed, {summary.num_failed} failed{cut}, in {summary.seconds:.1f} s; "
        f"{summary.prompt_tokens} prompt tokens, {summary.output_tokens} output tokens"
    )
    yield (
        f"  {summary.requests_per_second:.2f} requests/s, {summary.output_tokens_per_second:.1f} output tokens/s, "
        f"{summary.total_tokens_per_second:.1f} total tokens/s"
    )
    if slos is not None and summary.goodput is not None:
        good = summary.goodput
        yield f"  goodput {good.requests_per_second:.2f} requests/s: {good.attainment:.1%} of requests meet {slos}"
    rows: list[Sequence[str]] = [("ms", *_COLUMNS)]
    for name, title in _LATENCIES:
        distribution = getattr(summary, name)
        if distribution is not None:
            rows.append((title, *(_ms(distribution, column) for column in _COLUMNS)))
    if len(rows) > 1:
        yield _table(rows)


def _notes(result: RunResult, *, limited: bool) -> Iterator[str]:
    summary = result.summary
    if summary.cached_tokens:
        yield f"{summary.cached_tokens} prompt tokens came from the server's cache"
    if summary.counted_by != "usage":
        yield f"output tokens counted by {summary.counted_by}: the server does not always send usage"
    if summary.num_short:
        yield f"{summary.num_short} requests ended before the output length that was asked for"
    if not limited and summary.latest_start > 0.1:
        yield f"a request was sent {summary.latest_start * 1e3:.0f} ms late: this client could not keep up"
    if result.client_cpu_per_token is not None:
        yield f"this client took {result.client_cpu_per_token * 1e6:.0f} us of processor time per output token"
    for failure in summary.failures:
        yield f"failed: {failure.count} x {failure.kind}, the first: {failure.first_message}"
    if result.was_cut:
        yield "interrupted: these are the results so far"


def _ms(distribution: Distribution | None, column: str) -> str:
    return "-" if distribution is None else f"{getattr(distribution, column) * 1e3:.1f}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  "
        + "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
