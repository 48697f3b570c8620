"""When a node is ejected for failing its requests, and for how long."""

from random import Random

import pytest

from kvrelay.core.errors import (
    CancelledByPeerError,
    DeadlineError,
    InvalidRequestError,
    KVRelayError,
    OverloadedError,
    UnavailableError,
)
from router.nodes.outlier import Outlier
from tests.manual_clock import ManualClock


def make() -> tuple[Outlier, ManualClock]:
    clock = ManualClock()
    return Outlier("decode node x", clock, Random(0)), clock


def fail(outlier: Outlier, times: int) -> None:
    for _ in range(times):
        outlier.failed(KVRelayError("internal error"))


def test_failures_in_a_row_eject() -> None:
    outlier, clock = make()
    fail(outlier, 4)
    outlier.succeeded()
    fail(outlier, 4)
    assert not outlier.is_ejected
    outlier.failed(UnavailableError("gone"))
    assert outlier.is_ejected and outlier.num_ejections == 1
    clock.seconds += 3.7
    assert outlier.is_ejected, "three quarters of it at least"
    assert not outlier.is_on_probation
    clock.seconds += 1.4
    assert not outlier.is_ejected and outlier.is_on_probation


def test_one_more_failure_ejects_for_twice_as_long_and_one_success_forgives() -> None:
    outlier, clock = make()
    fail(outlier, 5)
    clock.seconds += 5.1
    for shortest, longest in ((7.5, 10.0), (15.0, 20.0), (30.0, 40.0), (45.0, 60.0), (45.0, 60.0)):
        assert not outlier.is_ejected
        fail(outlier, 1)
        clock.seconds += shortest - 0.01
        assert outlier.is_ejected
        clock.seconds += longest - shortest + 0.02
        assert not outlier.is_ejected
    outlier.succeeded()
    assert not outlier.is_on_probation
    fail(outlier, 4)
    assert not outlier.is_ejected and not outlier.is_on_probation
    fail(outlier, 1)
    clock.seconds += 5.1
    assert not outlier.is_ejected, "the time has begun anew too"
    assert outlier.num_ejections == 7


def test_requests_that_end_during_an_ejection_do_not_count() -> None:
    outlier, clock = make()
    fail(outlier, 20)
    outlier.succeeded()
    assert outlier.is_ejected and outlier.num_ejections == 1
    clock.seconds += 5.1
    assert not outlier.is_ejected
    fail(outlier, 1)
    assert outlier.is_ejected, "the success did not count"


@pytest.mark.parametrize("error", [InvalidRequestError, CancelledByPeerError, DeadlineError, OverloadedError])
def test_errors_that_are_not_the_nodes_fault_do_not_count(error: type[KVRelayError]) -> None:
    outlier, _ = make()
    for _ in range(10):
        outlier.failed(error("no"))
    assert not outlier.is_ejected


def test_a_reset_forgets_failures_and_ejections() -> None:
    outlier, _ = make()
    fail(outlier, 5)
    outlier.reset()
    assert not outlier.is_ejected and not outlier.is_on_probation
