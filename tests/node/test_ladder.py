"""Which source is asked for which block, and that the search ends."""

from itertools import product

import pytest

from kv_connector.base import FetchOutcome
from kvrelay.core.kv.source import KVSource
from kvrelay.core.node_report import FetchReport
from kvrelay.node import ladder as ladder_module
from kvrelay.node.ladder import Ask, Ladder

P = KVSource("p", 1, "at-p")
H = KVSource("h", 1, "at-h")
FETCHED, MISSING, REFUSED, FAILED = FetchOutcome


def next_ask(ladder: Ladder) -> tuple[KVSource | None, tuple[int, ...]] | None:
    ask = ladder.next()
    return None if ask is None else (ask.source, ask.indices)


def settle(ladder: Ladder, *outcomes: FetchOutcome) -> int:
    ask = ladder.next()
    assert ask is not None
    return ladder.settle(ask, outcomes)


def test_the_announcing_source_goes_before_holders_and_these_before_the_store() -> None:
    ladder = Ladder(3)
    ladder.add_holder(H, 2)
    assert next_ask(ladder) == (H, (0, 1)), "nobody has announced anything yet"
    ladder.announce(P, 3)
    assert next_ask(ladder) == (P, (0, 1, 2))
    settle(ladder, MISSING, MISSING, MISSING)
    assert next_ask(ladder) == (H, (0, 1))
    settle(ladder, MISSING, FETCHED)
    assert next_ask(ladder) == (None, (0, 2)), "only what is not here"
    settle(ladder, FETCHED, FETCHED)
    assert ladder.is_complete
    assert ladder.report(24) == FetchReport(24, (("", 2), ("h", 1)), num_missing=4)


def test_only_fetches_from_holders_that_announced_nothing_are_guesses() -> None:
    ladder = Ladder(2)
    ladder.add_holder(H, 2)
    ladder.add_holder(P, 2)
    ask = ladder.next()
    assert ask is not None and ask.is_guess
    ladder.announce(P, 2)
    ladder.add_holder(P, 2)
    ask = ladder.next()
    assert ask is not None and (ask.source, ask.is_guess) == (P, False)
    settle(ladder, MISSING, MISSING)
    settle(ladder, MISSING, MISSING)
    ask = ladder.next()
    assert ask is not None and (ask.source, ask.is_guess) == (None, False)


def test_what_a_node_has_sent_behind_a_bad_block_is_requested_from_the_next_source() -> None:
    """It may have been computed from the first bad one. A missing one says nothing of those behind it."""
    ladder = Ladder(6)
    ladder.add_holder(H, 6)
    ladder.announce(P, 5)
    assert settle(ladder, MISSING, FETCHED, REFUSED, FETCHED, REFUSED) == 0
    ladder.announce(P, 6)
    assert next_ask(ladder) == (H, (0, 2, 3, 4, 5))
    assert settle(ladder, FETCHED, FETCHED, FETCHED, FETCHED, FETCHED) == 6
    assert ladder.is_complete and set(ladder.report(0).fetched) == {("p", 1), ("h", 5)}


def test_so_is_what_the_node_has_sent_before() -> None:
    ladder = Ladder(3)
    ladder.announce(P, 3)
    assert settle(ladder, FETCHED, MISSING, FETCHED) == 1
    assert settle(ladder, MISSING) == 0, "the store"
    ladder.announce(P, 3)
    assert settle(ladder, REFUSED) == 0
    ladder.add_holder(H, 3)
    assert next_ask(ladder) == (H, (1, 2))


def test_what_others_have_sent_behind_the_bad_block_of_a_node_is_kept() -> None:
    ladder = Ladder(3)
    ladder.add_holder(H, 3)
    assert settle(ladder, FETCHED, MISSING, FETCHED) == 1
    ladder.announce(P, 3)
    ladder.ask_store()
    assert settle(ladder, REFUSED) == 0 and ladder.is_doubtful
    assert ladder.next() is None, "the store may have what comes of the bad block"
    other = KVSource("o", 1, "at-o")
    ladder.announce(other, 3)
    assert next_ask(ladder) == (other, (1,))


def test_what_the_store_has_sent_behind_the_bad_block_of_a_node_is_not_used() -> None:
    """The node may have computed it, and put it there."""
    ladder = Ladder(4)
    ladder.ask_store()
    assert settle(ladder, FETCHED, MISSING, FETCHED, FETCHED) == 1 and not ladder.is_doubtful
    ladder.announce(P, 4)
    assert settle(ladder, REFUSED) == 0
    assert ladder.next() is None
    ladder.announce(H, 4)
    assert next_ask(ladder) == (H, (1, 2, 3))


def test_after_a_bad_block_from_the_store_only_that_block_is_requested_from_the_next_source() -> None:
    """Nodes write into it what they have computed themselves."""
    ladder = Ladder(4)
    ladder.ask_store()
    assert settle(ladder, FETCHED, REFUSED, FETCHED, FETCHED) == 1
    ladder.announce(P, 4)
    assert next_ask(ladder) == (P, (1,))
    assert settle(ladder, FETCHED) == 3 and ladder.is_complete


def test_a_source_that_could_not_be_reached_is_not_asked_again() -> None:
    ladder = Ladder(3)
    ladder.add_holder(P, 1)
    settle(ladder, FAILED)
    ladder.announce(P, 3)
    assert next_ask(ladder) == (None, (0, 1, 2))
    settle(ladder, FAILED, FAILED, FAILED)
    ladder.ask_store()
    assert ladder.next() is None
    ladder.add_holder(P, 3)
    assert ladder.next() is None, "nor when it is named again"
    restarted = KVSource("p", 2, "at-p")
    ladder.announce(restarted, 2)
    assert next_ask(ladder) == (restarted, (0, 1))


def test_a_source_is_given_up_for_one_block_that_failed_whatever_became_of_those_behind_it() -> None:
    ladder = Ladder(2)
    ladder.announce(P, 2)
    settle(ladder, FAILED, MISSING)
    ladder.announce(P, 2)
    settle(ladder, FETCHED, MISSING)  # the store
    assert ladder.next() is None


def test_a_source_whose_fetch_brought_only_some_blocks_in_its_time_is_asked_for_the_others() -> None:
    """The link is slow, but works: not to be given up, and no failure for the router to count against it."""
    ladder = Ladder(4)
    ladder.add_holder(H, 4)
    ladder.announce(P, 4)
    assert settle(ladder, FETCHED, FAILED, FETCHED, FAILED) == 1
    assert ladder.report(0).num_failed == 0
    assert next_ask(ladder) == (P, (1, 3))
    assert settle(ladder, FETCHED, FAILED) == 2
    assert next_ask(ladder) == (H, (3,)), "twice in a row is too slow"
    settle(ladder, FETCHED)
    assert ladder.is_complete and ladder.report(0).num_failed == 1


def test_a_source_that_is_slow_now_and_then_is_asked_once_more_each_time() -> None:
    ladder = Ladder(192)
    ladder.announce(P, 192)
    for _ in range(2):
        assert settle(ladder, *[FETCHED] * 32, *[FAILED] * 32) == 32
        assert settle(ladder, *[FETCHED] * 64) == 64
    assert ladder.is_complete and ladder.report(0) == FetchReport(0, (("p", 192),))


@pytest.mark.parametrize(
    "outcomes",
    [
        [*[FETCHED] * 15, *[FAILED] * 49],  # slower than computing them
        [FAILED, *[FETCHED] * 63],  # not slow: something is wrong with this block
        [MISSING, FAILED, *[FETCHED] * 62],
    ],
)
def test_a_source_is_given_up_whose_fetch_failed_otherwise(outcomes: list[FetchOutcome]) -> None:
    ladder = Ladder(64)
    ladder.add_holder(H, 64)
    ladder.announce(P, 64)
    settle(ladder, *outcomes)
    ask = ladder.next()
    assert ask is not None and ask.source == H


def test_a_holder_that_has_announced_nothing_gets_no_second_chance() -> None:
    ladder = Ladder(4)
    ladder.add_holder(H, 4)
    settle(ladder, FETCHED, FETCHED, FETCHED, FAILED)
    assert ladder.next() is None


def test_missing_blocks_are_requested_again_after_an_announcement() -> None:
    ladder = Ladder(2)
    ladder.announce(P, 2)
    settle(ladder, MISSING, MISSING)
    settle(ladder, MISSING, MISSING)  # the store
    assert ladder.next() is None
    ladder.announce(P, 2)
    assert next_ask(ladder) == (P, (0, 1))


def test_a_store_that_sends_several_bad_blocks_is_not_asked_again() -> None:
    ladder = Ladder(200)
    ladder.ask_store()
    settle(ladder, REFUSED, REFUSED, *[FETCHED] * 62)
    ladder.announce(P, 2)
    assert settle(ladder, FETCHED, FETCHED) == 64
    assert next_ask(ladder) == (None, tuple(range(64, 128))), "two may be an accident"
    settle(ladder, REFUSED, *[FETCHED] * 63)
    ladder.add_holder(H, 65)
    assert settle(ladder, FETCHED) == 64
    assert ladder.next() is None, "the third one was one too many"


def test_blocks_behind_a_gap_are_not_reported_as_fetched() -> None:
    """They are not delivered, but computed after the gap."""
    ladder = Ladder(4)
    ladder.announce(P, 4)
    assert settle(ladder, FETCHED, MISSING, FETCHED, FETCHED) == 1
    assert ladder.report(8) == FetchReport(8, (("p", 1),), num_missing=1)


def test_the_store_is_not_asked_for_blocks_that_are_still_being_computed() -> None:
    ladder = Ladder(3)
    assert ladder.next() is None
    ladder.announce(P, 1)
    assert settle(ladder, FETCHED) == 1
    assert ladder.next() is None
    ladder.ask_store()
    assert next_ask(ladder) == (None, (1, 2))


def test_an_announcement_takes_nothing_back() -> None:
    ladder = Ladder(3)
    ladder.add_holder(P, 3)
    ladder.ask_store()
    ladder.announce(P, 1)
    assert next_ask(ladder) == (P, (0, 1, 2)), "it was known to hold them before"
    settle(ladder, FAILED, FAILED, FAILED)
    assert next_ask(ladder) == (None, (0, 1, 2))


def test_only_what_a_store_lacks_is_no_failure() -> None:
    ladder = Ladder(3)
    ladder.ask_store()
    settle(ladder, MISSING, REFUSED, FAILED)
    assert ladder.report(0) == FetchReport(0, num_refused=1, num_failed=1)


def test_a_source_without_an_endpoint_is_the_store() -> None:
    ladder = Ladder(2)
    ladder.add_holder(KVSource("a", 1, ""), 1)
    assert next_ask(ladder) == (None, (0,))
    settle(ladder, MISSING)
    assert ladder.next() is None
    ladder.announce(KVSource("b", 7, ""), 2)
    assert next_ask(ladder) == (None, (0, 1))
    settle(ladder, REFUSED, MISSING)
    ladder.announce(KVSource("a", 1, ""), 2)
    assert ladder.next() is None, "no bad block is requested again"


def test_long_prefixes_are_requested_in_parts() -> None:
    ladder = Ladder(100)
    ladder.announce(P, 1000)
    assert settle(ladder, *[FETCHED] * 64) == 64
    assert next_ask(ladder) == (P, tuple(range(64, 100)))


def test_a_long_prefix_is_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not once for every part of it: a prompt of a million tokens is fetched in a thousand."""
    num_blocks, asked = 6400, 0
    has = ladder_module._Holder.has

    def counted(holder: ladder_module._Holder, index: int) -> bool:
        nonlocal asked
        asked += 1
        return has(holder, index)

    monkeypatch.setattr(ladder_module._Holder, "has", counted)
    ladder = Ladder(num_blocks)
    ladder.announce(P, num_blocks)
    while (ask := ladder.next()) is not None:
        ladder.settle(ask, [FETCHED] * len(ask.indices))
    assert ladder.is_complete
    assert asked <= 2 * num_blocks


def test_the_search_ends_whatever_the_outcomes() -> None:
    for first, second, third in product(FetchOutcome, repeat=3):
        ladder = Ladder(4)
        ladder.add_holder(H, 4)
        ladder.announce(P, 3)
        ladder.ask_store()
        num_asks = 0
        while (ask := ladder.next()) is not None:
            ladder.settle(ask, [_outcome(ask, first, second, third)] * len(ask.indices))
            num_asks += 1
        assert num_asks <= 6
        leading = sum(count for _, count in ladder.report(0).fetched)
        assert leading == ladder.num_leading
        may_ask_store = REFUSED not in (first, second)
        assert ladder.is_complete == (second is FETCHED or (third is FETCHED and may_ask_store))


def _outcome(ask: Ask, p: FetchOutcome, h: FetchOutcome, store: FetchOutcome) -> FetchOutcome:
    return {P: p, H: h, None: store}[ask.source]
