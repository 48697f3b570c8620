"""When the circuit breaker admits attempts: not after failures in a row, then one at a time after a wait."""

from kvrelay.core.breaker import CircuitBreaker, Permit
from tests.manual_clock import ManualClock


def admitted(tried: CircuitBreaker) -> Permit:
    permit = tried.admit()
    assert permit is not None
    return permit


def test_failures_in_a_row_open_the_breaker() -> None:
    tried = CircuitBreaker(ManualClock())
    for _ in range(5):
        for _ in range(2):
            tried.failed(admitted(tried))
        tried.succeeded()  # the count begins again
    for _ in range(3):
        tried.failed(admitted(tried))
    assert not tried.admit()


def test_an_open_breaker_admits_one_attempt_at_a_time_after_waits_that_grow() -> None:
    clock = ManualClock()
    tried = CircuitBreaker(clock, threshold=1)
    tried.failed(admitted(tried))
    for longest in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
        clock.seconds += longest * 0.49
        assert not tried.admit()
        clock.seconds += longest * 0.52
        trial = admitted(tried)
        assert not tried.admit()
        tried.failed(trial)
    clock.seconds += 30.0
    assert tried.admit()
    tried.succeeded()
    assert tried.admit()
    tried.failed(admitted(tried))
    clock.seconds += 0.5  # as short as at first
    assert tried.admit()


def test_after_an_abandoned_attempt_another_is_admitted() -> None:
    clock = ManualClock()
    tried = CircuitBreaker(clock, threshold=1)
    tried.failed(admitted(tried))
    clock.seconds += 0.5
    tried.abandoned(admitted(tried))
    assert tried.admit() and not tried.admit()


def test_attempts_admitted_before_it_opened_neither_lengthen_the_wait_nor_end_the_trial() -> None:
    clock = ManualClock()
    tried = CircuitBreaker(clock, threshold=1)
    before = [admitted(tried) for _ in range(12)]
    for permit in before[:10]:
        tried.failed(permit)
    clock.seconds += 0.5
    trial = admitted(tried)
    tried.failed(before[10])
    tried.abandoned(before[11])
    clock.seconds += 1.0
    assert not tried.admit(), "the trial is still under way"
    tried.abandoned(trial)
    assert tried.admit()
