"""A measured rate: what it makes of its samples."""

from kvrelay.core.rate import Rate


def test_a_rate_is_the_weighted_average_of_its_samples() -> None:
    rate = Rate()
    rate.observe(0, 1.0)
    rate.observe(1, 0.0)
    assert rate.per_second is None
    rate.observe(100, 1.0)
    rate.observe(300, 1.0)
    assert rate.per_second == 140
