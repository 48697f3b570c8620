"""The rate at which a node computes prompts, from the load reports of its engine."""

import pytest

from kvrelay.engine.step_result import EngineLoad
from kvrelay.node.prefill_rate import PrefillRate


def test_the_rate_is_the_average_over_what_was_computed_between_reports() -> None:
    rate = PrefillRate()
    assert rate.seconds(100) is None
    rate.observe(load(0, 0.0))
    assert rate.seconds(100) is None
    rate.observe(load(1000, 2.0))
    assert rate.seconds(100) == pytest.approx(0.2)
    rate.observe(load(1000, 2.0))  # nothing new
    assert rate.seconds(100) == pytest.approx(0.2)
    rate.observe(load(3000, 3.0))
    assert rate.seconds(100) == pytest.approx(100 / 800)


def load(num_prefilled_tokens: int, prefill_seconds: float) -> EngineLoad:
    return EngineLoad(num_prefilled_tokens=num_prefilled_tokens, prefill_seconds=prefill_seconds)
