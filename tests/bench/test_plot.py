"""What is drawn: lines, labels and legends of the figures, not their pixels."""

from pathlib import Path

import numpy as np
import pytest

from kvrelay.bench.base import Failure
from kvrelay.bench.plot import plot_curve, plot_distributions, save_plot
from kvrelay.core.errors import ConfigurationError
from tests.bench.records import record, run_of


def test_distributions_have_a_line_per_kind() -> None:
    records = [
        record(0.2, 0.3, 0.5, kind="steady"),
        record(0.1, 0.3, kind="steady", index=1),
        record(0.4, kind="long", index=2),
        record(9.0, kind="long", index=3, failure=Failure("timeout", "")),
    ]
    figure = plot_distributions(run_of(*records), "tiny-model")
    left, right = figure.axes
    assert figure.get_suptitle() == "tiny-model"
    assert (left.get_xlabel(), right.get_xlabel(), left.get_ylabel()) == ("TTFT, ms", "ITL, ms", "share")
    drawn = {str(line.get_label()): line.get_xydata() for line in left.lines}
    assert list(drawn) == ["steady", "long"]
    assert drawn["steady"] == pytest.approx(np.array([[100, 0], [100, 0.5], [200, 1]]))
    assert drawn["long"] == pytest.approx(np.array([[400, 0], [400, 1]])), "a failed request has no latency"
    [gaps] = right.lines
    assert gaps.get_xydata() == pytest.approx(np.array([[100, 0], [100, 1 / 3], [200, 2 / 3], [200, 1]]))
    legend = left.get_legend()
    assert legend is not None and [text.get_text() for text in legend.get_texts()] == ["steady", "long"]


def test_one_kind_needs_no_legend() -> None:
    figure = plot_distributions(run_of(record(0.2, 0.3)), "m")
    assert [axis.get_legend() for axis in figure.axes] == [None, None]


def test_a_curve_has_a_point_per_load() -> None:
    loads = [run_of(record(0.1, 0.3), label="1/s"), run_of(record(0.2, 0.5), label="2/s", was_cut=True)]
    figure = plot_curve(loads, "m")
    ttft, itl = figure.axes
    assert (ttft.get_ylabel(), itl.get_ylabel(), ttft.get_xlabel()) == ("TTFT, ms", "ITL, ms", "output tokens/s")
    for axis, expected in ((ttft, [100, 200]), (itl, [200, 300])):
        assert [str(line.get_label()) for line in axis.lines] == ["p50", "p99"]
        for line in axis.lines:
            assert line.get_xdata() == pytest.approx([2 / 0.3, 2 / 0.5])
            assert line.get_ydata() == pytest.approx(expected)
        assert [text.get_text() for text in axis.texts] == ["1/s", "2/s (cut off)"]
        legend = axis.get_legend()
        assert legend is not None and [text.get_text() for text in legend.get_texts()] == ["p50", "p99"]


def test_a_load_without_output_has_no_point() -> None:
    figure = plot_curve([run_of(record(failure=Failure("connect", ""))), run_of(record(0.1, 0.3))], "m")
    assert [np.shape(line.get_xydata()) for axis in figure.axes for line in axis.lines] == [(1, 2)] * 4


def test_a_plot_is_saved_as_png(tmp_path: Path) -> None:
    figure = plot_curve([run_of(record(0.1, 0.3))], "m")
    save_plot(figure, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigurationError, match=r"--plot: cannot write .*: No such file or directory"):
        save_plot(figure, tmp_path / "missing" / "curve.png")
