"""Which exchanges count against a Redis server, whatever the server says: none is connected here."""

import asyncio
from dataclasses import replace

import pytest

from kv_connector.settings import RedisSettings
from kv_connector.store.redis_link import CircuitOpenError, RedisLink
from tests.manual_clock import ManualClock


async def exchange(link: RedisLink, error: BaseException | None = None, timeout: float | None = None) -> None:
    async with link.exchange(timeout):
        if error is not None:
            raise error


@pytest.mark.parametrize(("end", "timeout"), [(asyncio.CancelledError(), None), (TimeoutError(), 0.05)])
async def test_a_server_is_tried_again_though_the_first_trial_said_nothing(
    end: BaseException, timeout: float | None
) -> None:
    """It was cancelled, or had too little time."""
    clock = ManualClock()
    link = RedisLink(RedisSettings(), clock)
    for _ in range(3):
        with pytest.raises(OSError):
            await exchange(link, OSError())
    with pytest.raises(CircuitOpenError):
        await exchange(link)
    clock.seconds += 60.0
    with pytest.raises(type(end)):
        await exchange(link, end, timeout)
    await exchange(link)


async def test_a_short_time_of_its_own_says_nothing_but_all_that_is_allowed_does() -> None:
    link = RedisLink(RedisSettings(operation_timeout_seconds=0.1), ManualClock())
    for timeout, expected in ((0.05, TimeoutError), (None, TimeoutError), (None, CircuitOpenError)):
        for _ in range(3 if expected is TimeoutError else 1):
            with pytest.raises(expected):
                await exchange(link, TimeoutError(), timeout)


async def test_a_server_that_cannot_be_reached_counts_however_short_the_time_was() -> None:
    link = RedisLink(RedisSettings(), ManualClock())
    for _ in range(3):
        with pytest.raises(OSError):
            await exchange(link, OSError(), 0.05)
    with pytest.raises(CircuitOpenError):
        await exchange(link)


@pytest.mark.parametrize("fault", [ValueError("ours"), TypeError("ours"), KeyError("ours"), AttributeError("ours")])
async def test_a_fault_of_ours_during_an_exchange_is_not_taken_for_one_of_redis(fault: Exception) -> None:
    """Unlike those that redis-py raises for an answer (`answer_of`)."""
    link = RedisLink(RedisSettings(), ManualClock())
    for _ in range(4):
        with pytest.raises(type(fault), match="ours"):
            await exchange(link, fault)
    await exchange(link)
    await link.close()


@pytest.mark.parametrize("is_answered", [True, False])
async def test_a_timeout_does_not_count_if_the_server_has_answered_another_exchange_meanwhile(
    is_answered: bool,
) -> None:
    link = RedisLink(RedisSettings(), ManualClock())
    over = asyncio.Event()

    async def slow() -> None:
        async with link.exchange():
            await over.wait()
            raise TimeoutError

    if not is_answered:
        await exchange(link)  # which was before
    async with asyncio.timeout(10):
        under_way = [asyncio.create_task(slow()) for _ in range(3)]
        await asyncio.sleep(0)
        if is_answered:
            await exchange(link)
        over.set()
        ends = await asyncio.gather(*under_way, return_exceptions=True)
    assert [type(end) for end in ends] == [TimeoutError] * 3
    assert link.server.is_open is not is_answered


@pytest.mark.parametrize("limit", ["", "?max_connections=1"])
async def test_waiting_for_a_connection_of_our_own_says_nothing_of_the_server(limit: str) -> None:
    settings = RedisSettings(f"redis://127.0.0.1:1{limit}", max_connections=8 if limit else 1)
    link = RedisLink(replace(settings, operation_timeout_seconds=60.0), ManualClock())
    async with link.exchange():
        for _ in range(3):
            with pytest.raises(TimeoutError, match="no connection was free, of 1"):
                await exchange(link, timeout=0.3)
    assert not link.server.is_open
    await exchange(link)


async def test_a_server_that_is_left_alone_is_not_waited_for() -> None:
    link = RedisLink(RedisSettings(max_connections=1, operation_timeout_seconds=60.0), ManualClock())
    async with link.exchange():
        for _ in range(3):
            permit = link.server.admit()
            assert permit is not None
            link.server.failed(permit)
        async with asyncio.timeout(10):
            with pytest.raises(CircuitOpenError):
                await exchange(link)
