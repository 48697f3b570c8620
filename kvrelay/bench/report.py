"""Tables of figures for a terminal."""

from collections.abc import Iterator, Sequence

from kvrelay.bench.offered import Offered
from kvrelay.bench.result import LATE_SECONDS, RunResult
from kvrelay.bench.slo import Slos
from kvrelay.bench.summary import Distribution, Summary

_STALL_SECONDS = 0.02  # shorter stalls of the client are not worth a note
_MANY_PER_PIECE = 1.05  # fewer tokens in a piece are the odd one without text
_FEW_PER_PIECE = 0.95
_MERGED_SHARE = 0.05
_PROMPT_GROWTH = 0.02  # room for a begin token
_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")
_LATENCIES = (
    ("ttft", "TTFT"),
    ("itl", "ITL"),
    ("tpot", "TPOT"),
    ("e2e", "E2E"),
)
_SWEEP_COLUMNS = (
    *("load", "offered", "req/s", "goodput", "meet SLOs", "out tok/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99"),
    *("failed", "flaw"),
)


def render(result: RunResult, slos: Slos | None) -> str:
    """Returns the table of one run, of each kind of request when there are several, and notes."""
    parts = ["\n".join(_lines(result.summary, slos))]
    parts += [f"{kind}\n" + "\n".join(_lines(summary, slos)) for kind, summary in result.by_kind.items()]
    parts.append("\n".join([*_rate_note(result), *_notes(result)]))
    return "\n\n".join(part for part in parts if part)


def render_sweep(results: Sequence[RunResult], knee: RunResult | None, slos: Slos | None, attainment: float) -> str:
    """Returns a table with a line per load, the notes of each load, and the knee."""
    rows: list[Sequence[str]] = [_SWEEP_COLUMNS, *(_sweep_row(result) for result in results)]
    parts = [_table(rows)]
    parts.append("\n".join(f"{result.label}: {note}" for result in results for note in _notes(result)))
    if slos is not None:
        parts.append(_knee_line(results, knee, slos, attainment))
    return "\n\n".join(part for part in parts if part)


def _sweep_row(result: RunResult) -> Sequence[str]:
    summary = result.summary
    goodput = summary.goodput
    return (
        result.label,
        "-" if result.offered is None else f"{result.offered.rate:.2f}",
        f"{summary.requests_per_second:.2f}",
        "-" if goodput is None else f"{goodput.requests_per_second:.2f}",
        "-" if goodput is None else f"{goodput.attainment:.1%}",
        f"{summary.output_tokens_per_second:.1f}",
        *(_ms(summary.ttft, name) for name in ("p50", "p99")),
        *(_ms(summary.itl, name) for name in ("p50", "p99")),
        str(summary.num_failed),
        ", ".join(result.flaws) or "-",
    )


def _knee_line(results: Sequence[RunResult], knee: RunResult | None, slos: Slos, attainment: float) -> str:
    share = f"{100 * attainment:g}%"
    left_out = "; loads with a flaw were left out" if any(result.flaws for result in results) else ""
    if knee is None:
        return f"no load meets {slos} for {share} of its requests{left_out}"
    return f"the highest load at which {share} of the requests meet {slos}: {knee.label}{left_out}"


def _lines(summary: Summary, slos: Slos | None) -> Iterator[str]:
    within = f" ({summary.num_within} within --duration)" if summary.num_within < summary.num_completed else ""
    cut = f", {summary.num_cancelled} cut off" if summary.num_cancelled else ""
    yield (
        f"  {summary.num_completed} requests completed{within}, {summary.num_failed} failed{cut}, in "
        f"{summary.seconds:.1f} s; {summary.prompt_tokens} prompt tokens, {summary.output_tokens} output tokens"
    )
    yield (
        f"  {summary.requests_per_second:.2f} requests/s, {summary.output_tokens_per_second:.1f} output tokens/s, "
        f"{summary.total_tokens_per_second:.1f} total tokens/s, {summary.mean_running:.1f} requests at a time"
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


def _notes(result: RunResult) -> Iterator[str]:
    summary = result.summary
    if summary.cached_tokens:
        yield f"{summary.cached_tokens} prompt tokens came from the server's cache"
    uncounted = sum(one.num_prompt_tokens == 0 for one in result.records if one.failure is None)
    if uncounted:
        yield f"prompt tokens are without those of {uncounted} requests, of which the server did not say how many"
    if abs(result.prompt_growth - 1) > _PROMPT_GROWTH:
        yield f"the server counted {result.prompt_growth:.2f} times the prompt tokens that were asked for"
    if summary.counted_by != "usage":
        all_told = all(record.counted_by == "usage" for record in result.records if record.failure is None)
        without = "requests that failed or were cut off have no" if all_told else "the server does not always send"
        yield f"output tokens counted by {summary.counted_by}: {without} usage"
    if result.tokens_per_piece > _MANY_PER_PIECE:
        yield f"a piece held {result.tokens_per_piece:.1f} output tokens on average: ITL is the time between pieces"
    whole = sum(len(one.arrivals) == 1 < one.num_output_tokens for one in result.records if one.failure is None)
    if whole:
        yield f"{whole} answers of several tokens came in one piece: without ITL and TPOT, they meet any --slo of these"
    if summary.merged_share > _MERGED_SHARE:
        merged = f"{summary.merged_share:.0%} of the pieces after the first came in one read with the one before"
        yield f"{merged}: the server, a proxy or this client held output back, which ITL and --slo itl do not show"
    if 0 < result.tokens_per_piece < _FEW_PER_PIECE:
        held = f"a piece held {result.tokens_per_piece:.2f} output tokens on average"
        yield f"{held}: some had none, and count in TTFT and ITL all the same"
    short = [record.counted_by for record in result.records if record.was_short]
    if "chunks" in short:
        yield f"{len(short)} requests had fewer chunks than tokens asked for: cut short, or several in a chunk"
    elif short:
        yield f"{len(short)} requests ended before the output length that was asked for"
    if result.client_was_late:
        yield f"a request was sent {summary.latest_start * 1e3:.0f} ms late: this client could not keep up"
    if result.was_too_small:
        yield f"{result.num_at_once} requests or conversations: there were never {result.max_concurrency} at a time"
    if result.offered is not None:
        yield from _backlog_note(result.offered)
    if result.longest_wait > LATE_SECONDS:
        wait = f"{result.longest_wait * 1e3:.0f} ms"
        yield f"with --concurrency a request waited {wait} for its place: no latency includes this wait"
    if result.longest_stall > _STALL_SECONDS:
        yield f"for up to {result.longest_stall * 1e3:.0f} ms this client did not notice what arrived"
    if result.client_cpu_per_token is not None:
        cost = f"{result.client_cpu_per_token * 1e6:.0f} us of processor time per output token"
        yield f"this client took {cost}, {result.client_cpu_share:.0%} of a core"
    for failure in summary.failures:
        yield f"failed: {failure.count} x {failure.kind}, the first: {failure.first_message}"
    if result.num_unsent:
        yield f"{result.num_unsent} turns were not sent, because an earlier one failed: no figure includes them"
    if result.was_cut:
        yield "interrupted: these are the results so far"


def _rate_note(result: RunResult) -> Iterator[str]:
    """Yields what the table of a sweep has a column for."""
    if result.offered is not None:
        asked = result.offered.asked_rate
        drawn = "" if asked is None else f", drawn for the {asked:g} that were asked for"
        yield f"{result.offered.rate:.2f} requests or conversations arrived per second{drawn}"


def _backlog_note(offered: Offered) -> Iterator[str]:
    if not offered.was_sustained:
        grew = "the last quarter of the requests took more than twice as long as the first"
        yield f"the server did not keep up: {grew}, and longer runs would give other figures"
    elif offered.was_too_short:
        left = f"{offered.num_unfinished} of {offered.num_arrived}"
        yield f"when the last one arrived, {left} had not ended: too few to show whether the server keeps up"


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
