"""Which prefill nodes' KV is expected to get to a decode node, after what has and has not got there."""

import logging
from dataclasses import replace
from random import Random

import pytest

from kvrelay.core.kv.source import KVSource
from kvrelay.core.kv.source_breakers import _CAPACITY
from kvrelay.core.node_report import NOTHING_FETCHED, FetchReport
from router.nodes.links import Delivery, Links
from tests.manual_clock import ManualClock

P, OTHER = (KVSource(name, 1, f"endpoint-{name}") for name in ("p", "other"))
CAME = FetchReport(10, (("p", 1), ("other", 3)))


class Case:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.links = Links(self.clock, Random(0))

    def begin(self, source: KVSource = P) -> Delivery:
        return self.links.begin(source, "d")

    def lose(self, times: int, source: KVSource = P) -> None:
        for _ in range(times):
            self.begin(source).settle(NOTHING_FETCHED, lacks_blocks=True)


@pytest.fixture
def case() -> Case:
    return Case()


def test_a_link_over_which_nothing_comes_is_left_alone_and_then_tried_by_one(case: Case) -> None:
    case.lose(2)
    assert (case.links.broken(), case.links.failing()) == ([], [])
    case.lose(1)
    assert (case.links.broken(), case.links.failing()) == ([P], [P])
    case.clock.seconds += 0.5
    assert (case.links.broken(), case.links.failing()) == ([], [P]), "it may be tried"
    trial = case.begin()
    assert case.links.broken() == [P]
    trial.settle(NOTHING_FETCHED, lacks_blocks=True)
    case.clock.seconds += 0.49
    assert case.links.broken() == [P], "for longer"
    case.clock.seconds += 0.51
    trial = case.begin()
    trial.settle(CAME, lacks_blocks=False)
    trial.close()
    assert (case.links.broken(), case.links.failing()) == ([], [])
    case.lose(2)
    assert case.links.broken() == [], "the count has begun again"


def test_a_link_that_fails_and_works_in_turn_is_logged_when_that_begins_and_when_it_is_over(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    case.lose(2)
    assert caplog.messages == []
    for _ in range(4):
        case.lose(3)
        case.begin().settle(CAME, lacks_blocks=False)
        case.clock.seconds += 1.0
    [begun] = caplog.messages
    assert begun.startswith("moving KV from p to d failed several times in a row; another prefill node is preferred")
    case.clock.seconds += 10.0
    case.begin().settle(CAME, lacks_blocks=False)
    assert caplog.messages == [begun, "moving KV from p to d works again; it failed 4 times"]


def test_a_trial_that_says_nothing_leaves_room_for_another(case: Case) -> None:
    """Its client leaves, or the decode node needed none of the blocks."""
    case.lose(3)
    case.clock.seconds += 0.5
    case.begin().close()
    assert case.links.broken() == []
    case.begin().settle(FetchReport(10, (("other", 3),)), lacks_blocks=False)
    assert case.links.broken() == []


def test_what_was_under_way_when_the_link_was_given_up_may_still_show_that_it_works(case: Case) -> None:
    before = [case.begin() for _ in range(5)]
    case.lose(3)
    late = case.begin()
    for delivery in (*before[:3], late):
        delivery.settle(NOTHING_FETCHED, lacks_blocks=True)
    case.clock.seconds += 0.5
    assert case.links.broken() == [], "after no longer a wait"
    case.lose(1)
    before[3].close()
    assert case.links.broken() == [P]
    before[4].settle(CAME, lacks_blocks=True)
    assert case.links.broken() == [], "a part of the blocks shows as much"


def test_a_link_that_breaks_off_after_some_blocks_is_left_alone_but_not_one_whose_blocks_are_lost(case: Case) -> None:
    """The decode node waits for its fetch to time out each time; what was evicted or damaged it knows at once."""
    lost = replace(CAME, num_missing=1, num_refused=1)
    broken_off = replace(CAME, num_failed=1)
    for _ in range(4):
        case.begin().settle(lost, lacks_blocks=True)
    for report, lacks_blocks in ((lost, True), (broken_off, False)):  # the latter: another node's blocks failed
        for _ in range(2):
            case.begin().settle(broken_off, lacks_blocks=True)
        case.begin().settle(report, lacks_blocks=lacks_blocks)
    for _ in range(2):
        case.begin().settle(broken_off, lacks_blocks=True)
    assert case.links.broken() == [], "not three in a row"
    case.begin().settle(broken_off, lacks_blocks=True)
    assert case.links.broken() == [P]


def test_only_the_first_word_on_a_delivery_counts(case: Case) -> None:
    left, lost, came = (case.begin() for _ in range(3))
    case.lose(1)
    left.close()
    lost.settle(NOTHING_FETCHED, lacks_blocks=True)
    for delivery in (left, lost):
        delivery.settle(NOTHING_FETCHED, lacks_blocks=True)
    assert case.links.broken() == [], "two have failed"
    came.settle(CAME, lacks_blocks=False)
    came.settle(NOTHING_FETCHED, lacks_blocks=True)
    case.lose(2)
    assert case.links.broken() == []


def test_of_a_node_that_publishes_to_a_store_blocks_come_from_there(case: Case) -> None:
    source = KVSource("p", 1, "")
    for _ in range(3):
        case.begin(source).settle(FetchReport(10, (("", 1),)), lacks_blocks=True)
    assert case.links.broken() == []
    for _ in range(3):
        case.begin(source).settle(CAME, lacks_blocks=True)
    assert case.links.broken() == [source]


def test_a_bounded_number_of_links_is_remembered(case: Case) -> None:
    for epoch in range(_CAPACITY + 1):
        case.lose(3, KVSource("p", epoch, "endpoint-p"))
    assert len(case.links.broken()) == _CAPACITY
