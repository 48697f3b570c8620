"""The benchmark's arithmetic: percentiles, rates, goodput, failures."""

from dataclasses import replace

import pytest

from kvrelay.bench.base import CANCELLED, Failure
from kvrelay.bench.slo import Slos
from kvrelay.bench.summary import Distribution, summaries_by_kind, summarise
from tests.bench.records import record


def test_percentiles_interpolate() -> None:
    found = Distribution.of(float(value) for value in range(101))
    assert found == Distribution(101, 50.0, 50.0, 90.0, 95.0, 99.0, 100.0)
    between = Distribution.of([1.0, 2.0])
    assert between is not None
    assert between.p50 == 1.5, "percentiles interpolate, as numpy's do"
    assert Distribution.of([]) is None


def test_latencies_and_rates_follow_from_the_records() -> None:
    summary = summarise([record(2.0, 2.5, 3.0, sent=1.0), record(4.0, 4.1, 5.0, sent=1.0)])
    assert (summary.num_completed, summary.output_tokens, summary.prompt_tokens) == (2, 6, 10)
    assert (summary.seconds, summary.output_tokens_per_second, summary.total_tokens_per_second) == (4.0, 1.5, 4.0)
    assert summary.requests_per_second == 0.5
    assert summary.ttft is not None and summary.itl is not None and summary.tpot is not None and summary.e2e is not None
    assert (summary.ttft.p50, summary.ttft.max) == (2.0, 3.0)
    assert summary.itl.count == 4
    assert summary.itl.max == pytest.approx(0.9)
    assert summary.tpot.mean == pytest.approx(0.5)
    assert (summary.e2e.p50, summary.e2e.max) == (3.0, 4.0)


def test_one_token_has_no_time_per_token() -> None:
    summary = summarise([record(1.0)])
    assert summary.tpot is None and summary.itl is None
    assert summary.ttft is not None and summary.ttft.mean == 1.0


def test_failures_count_tokens_but_no_latency() -> None:
    overload = Failure("http 429", "try later")
    records = [
        record(1.0, 2.0, index=0),
        record(9.0, index=1, failure=overload),
        record(index=2, failure=Failure("http 429", "the second message")),
        record(index=3, failure=Failure("timeout", "too late")),
        record(3.0, index=4, failure=Failure(CANCELLED, "the run ended first")),
    ]
    summary = summarise(records)
    assert (summary.num_completed, summary.num_failed, summary.num_cancelled) == (1, 3, 1)
    assert [(f.kind, f.count, f.first_message) for f in summary.failures] == [
        ("http 429", 2, "try later"),
        ("timeout", 1, "too late"),
    ]
    assert summary.output_tokens == 4
    assert summary.ttft is not None and summary.ttft.max == 1.0


@pytest.mark.parametrize("kind", ["timeout", CANCELLED])
def test_the_tokens_of_a_failed_request_are_of_those_that_the_server_counted_or_not(kind: str) -> None:
    cut, nothing = (replace(record(*got, failure=Failure(kind, "")), counted_by="chunks") for got in ((1.0,), ()))
    assert summarise([record(1.0, 2.0), cut]).counted_by == "usage and chunks"
    assert (summarise([cut]).counted_by, summarise([record(1.0, 2.0), nothing]).counted_by) == ("chunks", "usage")


@pytest.mark.parametrize("kind", ["timeout", CANCELLED])
def test_the_time_for_which_a_server_hangs_counts(kind: str) -> None:
    hung = record(0.01, 0.02, 0.03, finished=3.0, failure=Failure(kind, ""))
    summary = summarise([hung, hung, record(0.5, finished=0.6)])
    assert (summary.seconds, summary.output_tokens_per_second) == (3.0, 7 / 3.0)


def test_pieces_that_came_in_one_read_are_counted() -> None:
    merged = record(1.0, 1.0, 1.0, 2.0)
    summary = summarise([merged, record(1.0), record(1.0, 1.5), record(1.0, 1.0, failure=Failure("timeout", ""))])
    assert summary.merged_share == 0.5
    assert summarise([record(1.0)]).merged_share == 0.0


def test_goodput_needs_every_slo() -> None:
    slos = Slos.parse(["ttft=1500", "itl=600", "e2e=4000"])
    records = [
        record(1.0, 1.5, 2.0),
        record(2.0, 2.1),  # its first token is late
        record(1.0, 1.7, 2.0),  # one gap is too long
        record(failure=Failure("timeout", "")),
        record(1.0, failure=Failure(CANCELLED, "")),
    ]
    summary = summarise(records, slos=slos)
    assert summary.goodput is not None
    assert summary.goodput.attainment == 0.25, "of all requests that were not cut off"
    assert summary.goodput.requests_per_second == pytest.approx(1 / 2.1)


@pytest.mark.parametrize("text", ["ttft", "ttft=", "ttft=-1", "ttft=0", "tfft=5", "=5", "itl=fast"])
def test_what_is_no_slo_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="METRIC=MILLISECONDS"):
        Slos.parse([text])


def test_window_counts_what_came_within_it() -> None:
    """It begins before the first request is sent. Half of the first one's pieces bring half of its tokens."""
    first = replace(record(1.0, 2.0, 3.0, 4.0, sent=0.5), num_output_tokens=8)
    records = [first, record(9.0, sent=8.0)]
    summary = summarise(records, slos=Slos.parse(["e2e=9000"]), window=2.0)
    assert (summary.seconds, summary.output_tokens, summary.prompt_tokens) == (2.0, 4, 5)
    assert summary.mean_running == 0.75
    assert summary.requests_per_second == 0.0
    assert summary.goodput is not None
    assert (summary.goodput.requests_per_second, summary.goodput.attainment) == (0.0, 1.0)
    assert summary.ttft is not None and summary.ttft.count == 2, "latencies are of every request"


def test_kinds_have_their_own_summaries() -> None:
    records = [record(2.0, kind="long", index=1), record(1.0, kind="steady", index=0)]
    found = summaries_by_kind(records)
    assert list(found) == ["steady", "long"]
    assert found["long"].num_completed == 1
    assert summaries_by_kind(records[:1]) == {}


def test_short_answers_and_cached_tokens_are_counted() -> None:
    summary = summarise([record(1.0, wanted=4, cached=3), record(1.0)])
    assert (summary.num_short, summary.cached_tokens) == (1, 3)


def test_a_run_without_requests_has_no_latencies() -> None:
    summary = summarise([])
    assert (summary.num_completed, summary.output_tokens, summary.ttft) == (0, 0, None)
