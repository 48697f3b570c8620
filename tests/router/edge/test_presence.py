"""Work ends with the client that wants it."""

import asyncio

import pytest

from kvrelay.core.errors import CancelledByPeerError, UnavailableError
from router.edge.presence import PRESENCE, Presence


async def work(presence: Presence, began: asyncio.Event, *, seconds: float = 10.0) -> str:
    with presence:
        began.set()
        await asyncio.sleep(seconds)
    return "done"


async def begun(presence: Presence) -> "asyncio.Task[str]":
    began = asyncio.Event()
    task = asyncio.create_task(work(presence, began))
    await began.wait()
    return task


async def test_work_is_cancelled_when_the_client_leaves_and_the_task_goes_on() -> None:
    presence = Presence()

    async def request() -> str:
        with pytest.raises(CancelledByPeerError, match="the client disconnected"):
            await work(presence, asyncio.Event())
        await asyncio.sleep(0)  # not cancelled as well
        task = asyncio.current_task()
        assert task is not None and task.cancelling() == 0
        return "answered"

    task = asyncio.create_task(request())
    await asyncio.sleep(0)
    presence.leave()
    assert await task == "answered"


async def test_nothing_begins_for_a_client_that_has_left() -> None:
    presence, began = Presence(), asyncio.Event()
    presence.leave()
    with pytest.raises(CancelledByPeerError):
        await work(presence, began)
    assert not began.is_set()


async def test_a_client_that_leaves_later_ends_nothing_else() -> None:
    presence = Presence()
    with presence:
        pass
    presence.leave()
    await asyncio.sleep(0)


async def test_a_server_that_stops_makes_requests_fail_as_unavailable() -> None:
    task = await begun(Presence())
    task.cancel()
    with pytest.raises(UnavailableError, match="the router is stopping"):
        await task


async def test_a_server_that_stops_counts_although_the_client_leaves_too() -> None:
    presence = Presence()
    task = await begun(presence)
    task.cancel()
    presence.leave()
    with pytest.raises(UnavailableError):
        await task


async def test_an_error_of_the_work_is_raised_as_it_is() -> None:
    presence = Presence()
    with pytest.raises(KeyError), presence:
        raise KeyError
    with presence:  # and leaves it as it was
        pass


async def test_without_our_server_a_client_never_leaves() -> None:
    presence = Presence()
    assert Presence.of({"type": "http", "state": {PRESENCE: presence}}) is presence
    with Presence.of({"type": "http"}):
        await asyncio.sleep(0)
