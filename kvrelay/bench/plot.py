"""Figures of results as PNG files. matplotlib is imported when one is drawn: tables do not need it."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvrelay.bench.output_file import errors_naming
from kvrelay.bench.result import RunResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_distributions(result: RunResult, title: str) -> "Figure":
    """Returns two cumulative distributions, a line per kind of request: the share of requests whose TTFT, and of gaps
    whose ITL, was at most so many milliseconds."""
    figure, (left, right) = _axes(title)
    good = [record for record in result.records if record.failure is None]
    kinds = list(dict.fromkeys(record.kind for record in good))
    for kind in kinds:
        records = [record for record in good if record.kind == kind]
        _cumulative(left, [record.ttft * 1e3 for record in records], kind)
        _cumulative(right, [itl * 1e3 for record in records for itl in record.itls], kind)
    left.set_xlabel("TTFT, ms")
    right.set_xlabel("ITL, ms")
    left.set_ylabel("share")
    if len(kinds) > 1:
        left.legend()
    return figure


def plot_curve(results: Sequence[RunResult], title: str) -> "Figure":
    """Returns median and p99 of TTFT and of ITL in milliseconds over output tokens per second, a point per load."""
    figure, axes = _axes(title)
    for axis, name in zip(axes, ("ttft", "itl"), strict=True):
        points = [(result, getattr(result.summary, name)) for result in results if getattr(result.summary, name)]
        rates = [result.summary.output_tokens_per_second for result, _ in points]
        for column in ("p50", "p99"):
            values = [getattr(distribution, column) * 1e3 for _, distribution in points]
            axis.plot(rates, values, marker="o", label=column)
        for rate, (result, distribution) in zip(rates, points, strict=True):
            flaws = f" ({', '.join(result.flaws)})" if result.flaws else ""
            axis.annotate(result.label + flaws, (rate, distribution.p50 * 1e3), fontsize=7)
        axis.set_xlabel("output tokens/s")
        axis.set_ylabel(f"{name.upper()}, ms")
        axis.legend()
    return figure


def save_plot(figure: "Figure", path: Path) -> None:
    """Writes a PNG. Raises ConfigurationError when the file cannot be written."""
    with errors_naming("--plot", path):
        figure.savefig(path, format="png", dpi=120)


def _axes(title: str) -> "tuple[Figure, tuple[Axes, Axes]]":
    from matplotlib.figure import Figure  # without pyplot: no window system, no global state

    figure = Figure(figsize=(10, 4), layout="constrained")
    figure.suptitle(title, fontsize=9)
    left, right = figure.subplots(1, 2)
    return figure, (left, right)


def _cumulative(axis: "Axes", values: Sequence[float], label: str) -> None:
    if values:
        axis.ecdf(values, label=label or None)
