"""PNGs of results. matplotlib is imported when called: figures do not need it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvrelay.bench.result import RunResult
from kvrelay.core.errors import ConfigurationError


def plot_distributions(path: Path, result: RunResult, title: str) -> None:
    """The share of requests (TTFT) and of gaps (ITL) that took at most so long."""
    figure, (left, right) = _axes(title)
    groups = dict.fromkeys(record.kind for record in result.records if record.failure is None)
    for kind in groups:
        records = [record for record in result.records if record.kind == kind and record.failure is None]
        _cumulative(left, [record.ttft * 1e3 for record in records], kind)
        _cumulative(right, [itl * 1e3 for record in records for itl in record.itls], kind)
    left.set_xlabel("TTFT, ms")
    right.set_xlabel("ITL, ms")
    left.set_ylabel("share")
    if len(groups) > 1:
        left.legend()
    _save(figure, path)


def plot_curve(path: Path, results: Sequence[RunResult], title: str) -> None:
    """Median and p99 of TTFT and ITL over output tokens per second, a point per load."""
    figure, axes = _axes(title)
    for axis, name in zip(axes, ("ttft", "itl"), strict=True):
        points = [(result, getattr(result.summary, name)) for result in results if getattr(result.summary, name)]
        rates = [result.summary.output_tokens_per_second for result, _ in points]
        for column in ("p50", "p99"):
            values = [getattr(distribution, column) * 1e3 for _, distribution in points]
            axis.plot(rates, values, marker="o", label=column)
        for rate, (result, distribution) in zip(rates, points, strict=True):
            axis.annotate(result.label, (rate, distribution.p50 * 1e3), fontsize=7)
        axis.set_xlabel("output tokens/s")
        axis.set_ylabel(f"{name.upper()}, ms")
        axis.legend()
    _save(figure, path)


def _axes(title: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # without pyplot: no window system, no global state

    figure = Figure(figsize=(10, 4), layout="constrained")
    figure.suptitle(title, fontsize=9)
    return figure, figure.subplots(1, 2)


def _cumulative(axis: Any, values: Sequence[float], label: str) -> None:
    if values:
        axis.ecdf(values, label=label or None)


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise ConfigurationError(f"--plot: cannot write {path}: {error.strerror}") from error
