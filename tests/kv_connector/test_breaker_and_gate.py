"""When a store is left alone: after failures, and while computing is faster."""

import random

from kv_connector.cost_gate import CostGate, Rate, is_worth_fetching
from kv_connector.store.breaker import CircuitBreaker
from tests.manual_clock import ManualClock


def breaker(clock: ManualClock, threshold: int = 3) -> CircuitBreaker:
    return CircuitBreaker("x", clock, threshold=threshold, first_wait=1.0, longest_wait=4.0, rng=random.Random(7))


def test_failures_in_a_row_open_it() -> None:
    tried = breaker(ManualClock())
    for _ in range(5):
        for _ in range(2):
            assert tried.admit()
            tried.failed()
        tried.succeeded()  # the count begins again
    for _ in range(3):
        assert tried.admit()
        tried.failed()
    assert not tried.admit()


def test_one_attempt_at_a_time_after_waits_that_grow() -> None:
    clock = ManualClock()
    tried = breaker(clock, threshold=1)
    tried.failed()
    for longest in (1.0, 2.0, 4.0, 4.0):
        clock.seconds += longest * 0.49
        assert not tried.admit()
        clock.seconds += longest * 0.52
        assert tried.admit() and not tried.admit()
        tried.failed()
    clock.seconds += 4.0
    assert tried.admit()
    tried.succeeded()
    assert tried.admit() and tried.admit()
    tried.failed()
    clock.seconds += 1.0  # as short as at first
    assert tried.admit()


def test_an_abandoned_attempt_makes_way_for_another() -> None:
    clock = ManualClock()
    tried = breaker(clock, threshold=1)
    tried.failed()
    clock.seconds += 1.0
    assert tried.admit()
    tried.abandoned()
    assert tried.admit() and not tried.admit()


def test_stragglers_do_not_lengthen_the_wait() -> None:
    clock = ManualClock()
    tried = breaker(clock, threshold=1)
    for _ in range(10):  # all were admitted before the first one failed
        tried.failed()
    clock.seconds += 1.0
    assert tried.admit()


def test_fetching_must_beat_computing() -> None:
    assert is_worth_fetching(1000, bytes_per_second=1000.0, recompute_seconds=1.1)
    assert not is_worth_fetching(1000, bytes_per_second=1000.0, recompute_seconds=0.9)
    assert is_worth_fetching(1000, None, 0.0) and is_worth_fetching(1000, 1.0, None)


def test_rates_follow_what_is_measured() -> None:
    rate = Rate(weight=0.5)
    rate.observe(0, 1.0)
    rate.observe(1, 0.0)
    assert rate.per_second is None
    rate.observe(100, 1.0)
    rate.observe(300, 1.0)
    assert rate.per_second == 200


def test_a_closed_gate_is_tried_again_now_and_then() -> None:
    gate = CostGate(lambda num_tokens: num_tokens / 1000)
    assert gate.opens(16, 1 << 20)  # nothing is known of the store
    gate.observe(1 << 20, 1.0)
    assert [gate.opens(16, 1 << 20) for _ in range(32)] == ([False] * 15 + [True]) * 2
    for _ in range(100):
        gate.observe(1 << 20, 0.001)
    assert gate.opens(16, 1 << 20)
