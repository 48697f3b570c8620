"""When a store is asked for blocks: while that is faster than computing them, as far as both were measured."""

from kv_connector.cost_gate import CostGate, is_worth_fetching


def test_only_a_fetch_faster_than_computing_is_worth_it() -> None:
    assert is_worth_fetching(1000, bytes_per_second=1000.0, recompute_seconds=1.1)
    assert not is_worth_fetching(1000, bytes_per_second=1000.0, recompute_seconds=0.9)
    assert is_worth_fetching(1000, None, 0.0) and is_worth_fetching(1000, 1.0, None)


def test_a_closed_gate_lets_one_fetch_in_sixteen_through_and_opens_when_that_is_fast() -> None:
    gate = CostGate(lambda num_tokens: num_tokens / 1000)
    assert gate.opens(16, 1 << 20)  # nothing is known of the store
    gate.observe(1 << 20, 1.0)
    assert [gate.opens(16, 1 << 20) for _ in range(32)] == ([False] * 15 + [True]) * 2
    for _ in range(100):
        gate.observe(1 << 20, 0.001)
    assert gate.opens(16, 1 << 20)
