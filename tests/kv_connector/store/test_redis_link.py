"""Which exchanges count against a Redis server, whatever the server says: none is connected here."""

import asyncio

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
