"""Blocks of one request from holders that fail in every way: what arrives is right, in order, and unpinned once."""

import asyncio
import logging

import pytest

from kvrelay.core.node_report import FetchReport, RefusedBlock
from kvrelay.core.outages import Outages
from kvrelay.node.absences import Absences
from kvrelay.node.receiver import deadline_after
from tests.manual_clock import ManualClock
from tests.node.fake_node import BLOCK_SIZE
from tests.node.reception import reception


async def test_every_block_comes_from_the_source_that_announces_it() -> None:
    async with reception() as case:
        await case.p.hold(case.reservation, 5)
        case.receiver.announce(case.p.source, 5, ended=True)
        report = await case.run()
        assert report == FetchReport(37, (("p", 5),))
        assert case.connector.fetches == [("p", 5)] and case.missing == []


async def test_sources_are_asked_for_what_they_have_behind_the_blocks_that_were_here_before() -> None:
    """They count the blocks of the whole prompt. Those that are not published yet are not requested."""
    async with reception(num_here=2) as case:
        await case.h.hold(case.reservation, 1)
        await case.p.hold(case.reservation, 3)
        case.receiver.add_holder(case.h.source, 3)
        task = asyncio.create_task(case.run())
        while not case.connector.fetches:
            await asyncio.sleep(0)
        case.receiver.announce(case.p.source, 4)
        while await case.num_computed() < 4 * BLOCK_SIZE:
            assert not task.done()
        case.receiver.announce(case.p.source, 5, ended=True)
        assert await task == FetchReport(21, (("h", 1), ("p", 2)))
        assert case.connector.fetches == [("h", 1), ("p", 1), ("p", 1)], "the store is not asked meanwhile"
        assert case.missing == [], "nor is the router told"


async def test_holders_are_asked_before_anything_is_announced() -> None:
    async with reception() as case:
        await case.h.hold(case.reservation, 3)
        await case.p.hold(case.reservation, 5)
        task = asyncio.create_task(case.run())
        await asyncio.sleep(0)
        case.receiver.add_holder(case.h.source, 3)
        while case.connector.fetches != [("h", 3)]:
            assert not task.done(), "nobody was asked"
            await asyncio.sleep(0)
        case.receiver.announce(case.p.source, 5)
        assert (await task).fetched == (("h", 3), ("p", 2))


async def test_a_block_that_one_holder_lacks_comes_from_the_next() -> None:
    async with reception() as case:
        await case.p.hold(case.reservation, 5)
        await case.h.hold(case.reservation, 2)
        case.p.lose(1)
        case.receiver.announce(case.p.source, 5)
        case.receiver.add_holder(case.h.source, 2)
        assert await case.run() == FetchReport(37, (("p", 4), ("h", 1)), num_missing=1)
        assert case.connector.fetches == [("p", 5), ("h", 1)], "the blocks behind it were kept"
        assert not case.refused


async def test_a_damaged_block_and_those_behind_it_come_from_the_next_holder_and_are_reported() -> None:
    """Those behind it may have been computed from it."""
    async with reception() as case:
        await case.p.hold(case.reservation, 5)
        await case.h.hold(case.reservation, 5)
        case.p.corrupt(1)
        case.receiver.announce(case.p.source, 5)
        case.receiver.add_holder(case.h.source, 5)
        assert await case.run() == FetchReport(37, (("p", 1), ("h", 4)), num_refused=1)
        assert case.connector.fetches == [("p", 5), ("h", 4)]
        assert case.refused == [RefusedBlock(case.p.source, case.reservation.missing[1].block_hash)]


async def test_a_damaged_block_of_one_holder_leaves_the_rest_to_the_source_that_announces() -> None:
    async with reception() as case:
        for holder in (case.h, case.p):
            await holder.hold(case.reservation, 5)
        case.h.corrupt(1)
        case.receiver.add_holder(case.h.source, 5)
        task = asyncio.create_task(case.run())
        while not case.refused:
            await asyncio.sleep(0)
        case.receiver.announce(case.p.source, 5)
        assert await task == FetchReport(37, (("h", 1), ("p", 4)), num_refused=1)


async def test_behind_a_damaged_block_no_other_source_is_waited_for() -> None:
    """A prefill node asked for the rest might fetch from the store what was computed from the block."""
    async with reception() as case:
        await case.p.hold(case.reservation, 5)
        case.p.corrupt(1)
        case.receiver.announce(case.p.source, 5, ended=True)
        assert await case.run() == FetchReport(BLOCK_SIZE, (("p", 1),), num_refused=1)
        assert case.missing == []


async def test_of_several_blocks_that_one_fetch_brings_damaged_the_first_is_reported() -> None:
    """Those behind it may have been computed from it: to distrust a later one would leave the fault where it is."""
    async with reception() as case:
        await case.p.hold(case.reservation, 5)
        for index in (1, 3):
            case.p.corrupt(index)
        case.receiver.announce(case.p.source, 5)
        case.receiver.end()
        assert await case.run() == FetchReport(BLOCK_SIZE, (("p", 1),), num_refused=2)
        assert case.refused == [RefusedBlock(case.p.source, case.reservation.missing[1].block_hash)]


async def test_of_two_holders_that_send_a_block_damaged_only_the_first_is_reported() -> None:
    """It is rather the reader that damages it."""
    async with reception() as case:
        for holder in (case.p, case.h):
            await holder.hold(case.reservation, 5)
            holder.corrupt(1)
        case.receiver.announce(case.p.source, 5, ended=True)
        case.receiver.add_holder(case.h.source, 5)
        case.receiver.end()
        assert (await case.run()).num_refused == 2
        assert [refused.holder for refused in case.refused] == [case.p.source]


async def test_blocks_a_holder_was_found_to_lack_are_not_requested_from_it_unless_it_announces_them() -> None:
    absences = Absences(lambda: 0.0)
    async with reception(absences=absences) as case:
        await case.h.hold(case.reservation, 5)
        missing = case.reservation.missing
        absences.note(case.h.source, [missing[index].block_hash for index in (0, 1, 2, 3, 4)])
        case.receiver.add_holder(case.h.source, 5)
        case.receiver.end()
        assert (await case.run()).num_tokens == 0 and case.connector.fetches == [("", 5)]
    async with reception(absences=absences) as case:
        await case.h.hold(case.reservation, 5)
        case.receiver.announce(case.h.source, 5, ended=True)
        assert (await case.run()).fetched == (("h", 5),)


async def test_a_fetch_takes_at_most_half_of_the_time_that_the_request_has_left() -> None:
    for time_left, fetch_timeout, least, most in ((1000.0, 10.0, 10.0, 10.0), (1000.0, 9000.0, 400.0, 500.0)):
        async with reception(time_left=time_left, fetch_timeout=fetch_timeout) as case:
            await case.p.hold(case.reservation, 5)
            case.receiver.announce(case.p.source, 5)
            await case.run()
            [timeout] = case.connector.timeouts
            assert least <= timeout <= most
    async with reception(time_left=-1.0) as case:
        case.receiver.announce(case.p.source, 5)
        case.receiver.end()
        await case.run()
        assert set(case.connector.timeouts) == {0.0}, "it has ended already"
    assert deadline_after(0) is None
    now, end = asyncio.get_running_loop().time(), deadline_after(1500)
    assert end is not None and now + 1.5 <= end < now + 2.5


async def test_blocks_that_a_holder_lacks_are_remembered() -> None:
    absences = Absences(lambda: 0.0)
    async with reception(absences=absences) as case:
        await case.h.hold(case.reservation, 5)
        case.h.lose(1, 3)
        case.h.corrupt(2)
        case.receiver.add_holder(case.h.source, 5)
        case.receiver.end()
        assert (await case.run()).fetched == (("h", 1),)
        names = [block.block_hash for block in case.reservation.missing]
        assert [absences.has(case.h.source, name) for name in names] == [False, True, False, True, False]


async def test_a_holder_that_is_gone_is_asked_once() -> None:
    async with reception() as case:
        await case.p.close()
        await case.h.hold(case.reservation, 5)
        case.receiver.announce(case.p.source, 2)
        case.receiver.add_holder(case.h.source, 5)
        case.receiver.announce(case.p.source, 5)
        report = await case.run()
        assert report == FetchReport(37, (("h", 5),), num_failed=5)
        assert case.connector.fetches == [("p", 5), ("h", 5)]


async def test_a_holder_whose_fetches_raise_is_asked_once() -> None:
    async with reception() as case:
        case.connector.broken = {"p"}
        await case.h.hold(case.reservation, 5)
        case.receiver.add_holder(case.h.source, 3)
        case.receiver.announce(case.p.source, 3)
        task = asyncio.create_task(case.run())
        while len(case.connector.fetches) < 2:
            await asyncio.sleep(0)
        case.receiver.announce(case.p.source, 5)
        case.receiver.announce(case.h.source, 5)
        assert await task == FetchReport(37, (("h", 5),), num_failed=3)
        assert case.connector.fetches == [("p", 3), ("h", 3), ("h", 2)]


async def test_a_source_that_fails_every_request_is_logged_once_and_once_more_when_it_works(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    clock = ManualClock()
    outages = Outages(clock.now)
    for _ in range(5):
        async with reception(outages=outages) as case:
            case.connector.broken = {"p"}
            case.receiver.announce(case.p.source, 5)
            case.receiver.end()
            assert (await case.run()).num_failed == 5
    failed = "request r: 5 of 5 blocks did not arrive from p: told to fail; not logged again while it fails"
    assert caplog.messages == [failed]
    clock.seconds += 60
    async with reception(outages=outages) as case:
        await case.p.hold(case.reservation, 5)
        case.receiver.announce(case.p.source, 5, ended=True)
        await case.run()
    assert caplog.messages == [failed, "fetching from p works again; it failed 5 times"]


async def test_blocks_that_nobody_has_announced_are_no_failure_of_a_source_that_lacks_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with reception() as case:
        case.receiver.add_holder(case.h.source, 5)
        case.receiver.end()
        assert (await case.run()).num_tokens == 0
    assert caplog.messages == []


async def test_a_holder_that_hangs_costs_one_timeout() -> None:
    async with reception(fetch_timeout=0.02) as case:
        case.connector.hung = {"p", "h"}
        case.receiver.add_holder(case.h.source, 4)
        case.receiver.announce(case.p.source, 5)
        case.receiver.end()
        report = await case.run()
        assert report == FetchReport(num_failed=9)
        assert case.connector.fetches == [("p", 5), ("h", 4), ("", 5)]
        assert case.connector.timeouts[1] < case.connector.timeouts[0], "less for who has not announced anything"


async def test_blocks_that_no_holder_has_come_from_the_store() -> None:
    async with reception() as case:
        await case.p.hold(case.reservation, 5)
        await case.store.hold(case.reservation, 5)
        case.connector.store = case.store.source
        case.p.lose(0, 4)
        case.receiver.announce(case.p.source, 5)
        report = await case.run()
        assert report.fetched == (("", 2), ("p", 3)) and case.missing == []


async def test_the_store_is_asked_for_what_a_source_that_ended_has_not_announced() -> None:
    async with reception() as case:
        await case.p.hold(case.reservation, 2)
        await case.store.hold(case.reservation, 4)
        case.connector.store = case.store.source
        case.receiver.announce(case.p.source, 2, ended=True)
        task = asyncio.create_task(case.run())
        await case.told(5)
        case.receiver.end()
        assert (await task).fetched == (("p", 2), ("", 2))


async def test_a_holder_that_is_named_while_blocks_are_missing_is_asked_and_the_router_is_not_told_again() -> None:
    async with reception(patience=0.02) as case:
        await case.h.hold(case.reservation, 3)
        case.receiver.announce(case.p.source, 0, ended=True)
        task = asyncio.create_task(case.run())
        await case.told(37)
        case.receiver.add_holder(case.h.source, 3)
        assert (await task).fetched == (("h", 3),)
        assert case.missing == [37]


async def test_missing_blocks_are_reported_once_and_may_come_from_another_source() -> None:
    async with reception() as case:
        await case.p.hold(case.reservation, 2)
        case.receiver.announce(case.p.source, 2, ended=True)
        task = asyncio.create_task(case.run())
        while not case.missing:
            await asyncio.sleep(0)
        assert case.missing == [21] and not task.done()
        await case.h.hold(case.reservation, 5)
        case.receiver.announce(case.h.source, 3)
        while case.connector.fetches[-1][0] != "h":
            await asyncio.sleep(0)
        case.receiver.announce(case.h.source, 5, ended=True)
        assert (await task).fetched == (("p", 2), ("h", 3))
        assert case.missing == [21], "told once"


async def test_blocks_that_a_second_source_lacks_too_are_reported_again() -> None:
    async with reception() as case:
        case.receiver.announce(case.p.source, 0, ended=True)
        task = asyncio.create_task(case.run())
        while len(case.missing) < 1:
            await asyncio.sleep(0)
        await case.h.hold(case.reservation, 1)
        case.receiver.announce(case.h.source, 1, ended=True)
        while len(case.missing) < 2:
            await asyncio.sleep(0)
        assert case.missing == [37, 29] and not task.done()
        case.receiver.end()
        assert (await task).num_tokens == BLOCK_SIZE


async def test_the_wait_for_a_router_that_does_not_answer_ends(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged, but not of every request while the router is silent."""
    outages = Outages(lambda: 0.0)
    for _ in range(2):
        async with reception(patience=0.02, outages=outages) as case:
            await case.p.hold(case.reservation, 1)
            case.receiver.announce(case.p.source, 1, ended=True)
            assert (await case.run()).num_tokens == BLOCK_SIZE
            assert case.missing == [29]
    assert [message for message in caplog.messages if "nobody" in message] == [
        "request r: nobody sent the missing blocks; they are computed here; not logged again while it fails"
    ]


async def test_a_cancelled_reception_unpins_its_blocks() -> None:
    async with reception() as case:
        case.connector.hung = {"p"}
        case.receiver.announce(case.p.source, 5)
        task = asyncio.create_task(case.receiver.run())
        while not case.connector.fetches:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
