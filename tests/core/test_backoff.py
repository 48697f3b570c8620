"""Waits that double, stay within their bounds, and begin again."""

from random import Random

import pytest

from kvrelay.core.backoff import Backoff


def test_waits_double_up_to_the_longest_and_begin_again_after_a_reset() -> None:
    backoff = Backoff(first=0.25, longest=1.5, jitter=0.0)
    assert [backoff.next() for _ in range(5)] == [0.25, 0.5, 1.0, 1.5, 1.5]
    backoff.reset()
    assert backoff.next() == 0.25


@pytest.mark.parametrize("jitter", [0.25, 0.5])
def test_jitter_only_shortens_a_wait_and_by_no_more_than_its_share(jitter: float) -> None:
    backoff = Backoff(first=1.0, longest=1.0, jitter=jitter, random=Random(7))
    waits = [backoff.next() for _ in range(200)]
    assert 1.0 - jitter <= min(waits) < 1.0 - 0.9 * jitter
    assert 1.0 - 0.1 * jitter < max(waits) <= 1.0
