"""What the log says of something that fails at every request."""

import logging

import pytest

from kvrelay.core.outages import _CALM_SECONDS, _CAPACITY, _OVER_SECONDS, Outages
from tests.manual_clock import ManualClock


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns what is logged where debugging is off, and forgets it."""
    found = [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]
    caplog.clear()
    return found


def test_an_outage_is_two_lines_however_much_fails(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    clock = ManualClock()
    outages = Outages(clock.now)
    outages.succeeded("fetching from a")
    for number in range(100):
        outages.failed("fetching from a", "request %d: nothing came", number)
        clock.seconds += 1
    assert caplog.messages[1] == "request 1: nothing came", "for debugging, everything"
    assert lines(caplog) == ["request 0: nothing came; not logged again while it fails"]
    outages.failed("b", "request %d: nothing came", 100)
    assert lines(caplog) == ["request 100: nothing came; not logged again while it fails"]
    clock.seconds += _CALM_SECONDS
    outages.succeeded("fetching from a")
    outages.succeeded("fetching from a")
    outages.succeeded("b")
    assert lines(caplog) == ["fetching from a works again; it failed 100 times", "b works again; it failed once"]


def test_what_fails_now_and_then_is_not_logged_each_time(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = ManualClock()
    outages = Outages(clock.now)
    for _ in range(100):
        outages.failed("fetching from a", "nothing came")
        outages.succeeded("fetching from a")
        clock.seconds += _CALM_SECONDS / 2
        outages.succeeded("fetching from a")
    assert lines(caplog) == ["nothing came; not logged again while it fails"]


def test_a_failure_long_after_the_last_one_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    outages = Outages(clock.now)
    for _ in range(3):
        outages.failed("fetching from a", "nothing came")
        clock.seconds += _OVER_SECONDS / 2
        outages.failed("fetching from a", "nothing came")
        clock.seconds += _OVER_SECONDS
    assert lines(caplog) == ["nothing came; not logged again while it fails"] * 3


def test_no_more_outages_are_remembered_than_there_is_room_for() -> None:
    outages = Outages(ManualClock().now)
    for number in range(3 * _CAPACITY):
        outages.failed(f"fetching from {number}", "nothing came")
    assert len(outages._outages) == _CAPACITY
