"""A write deadline ends the write that takes too long, and nothing else."""

import asyncio
import gc
import weakref
from collections.abc import Coroutine
from contextlib import closing
from typing import Any, TypeVar

import pytest

from kvrelay.core.errors import CancelledByPeerError
from kvrelay.core.rpc.write_deadline import WriteDeadline
from tests.simulation.virtual_loop import VirtualLoop

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine under virtual time, in which sleeping takes no real time. No timer may fail or be left."""

    async def checked() -> T:
        loop = asyncio.get_running_loop()
        failures: list[dict[str, Any]] = []
        loop.set_exception_handler(lambda _, context: failures.append(context))
        try:
            return await main
        finally:
            assert failures == []
            assert [timer for timer in vars(loop)["_scheduled"] if not timer.cancelled()] == []

    loop = VirtualLoop()
    try:
        return loop.run_until_complete(checked())
    finally:
        loop.close()


async def cancelled_after(seconds: float, write: Coroutine[Any, Any, T]) -> T:
    """Awaits `write`, which is cancelled from outside after so many seconds."""
    task = asyncio.ensure_future(write)
    asyncio.get_running_loop().call_later(seconds, task.cancel)
    return await task


def test_a_write_that_takes_too_long_is_cancelled_when_its_time_is_over() -> None:
    async def write() -> float:
        now = asyncio.get_running_loop().time
        began = now()
        with closing(WriteDeadline(10.0)) as deadline:
            with deadline:
                await asyncio.sleep(9.0)
            await asyncio.sleep(100.0)  # no write is under way
            with deadline:
                await asyncio.sleep(9.5)
            with pytest.raises(CancelledByPeerError, match="took nothing for 10 seconds"), deadline:
                await asyncio.sleep(1000.0)
            with deadline:  # the task goes on
                await asyncio.sleep(1.0)
        task = asyncio.current_task()
        assert task is not None and task.cancelling() == 0
        return now() - began

    assert run(write()) == pytest.approx(9.0 + 100.0 + 9.5 + 10.0 + 1.0)


def test_a_cancellation_from_outside_is_not_taken_for_an_expired_deadline() -> None:
    async def write() -> None:
        with closing(WriteDeadline(10.0)) as deadline, deadline:
            await asyncio.sleep(1000.0)

    for seconds in (5.0, 10.0):  # before the deadline, and in the same turn
        with pytest.raises(asyncio.CancelledError):
            run(cancelled_after(seconds, write()))


def test_a_cancellation_after_an_expired_deadline_is_one() -> None:
    async def write() -> None:
        with closing(WriteDeadline(10.0)) as deadline:
            with pytest.raises(CancelledByPeerError), deadline:
                await asyncio.sleep(1000.0)
            with deadline:
                await asyncio.sleep(1000.0)

    with pytest.raises(asyncio.CancelledError):
        run(cancelled_after(15.0, write()))


def test_a_deadline_expires_in_a_task_that_has_survived_a_cancellation() -> None:
    async def write() -> None:
        with pytest.raises(asyncio.CancelledError):
            await asyncio.sleep(1000.0)
        with closing(WriteDeadline(10.0)) as deadline, deadline:
            await asyncio.sleep(1000.0)

    async def main() -> None:
        task = asyncio.ensure_future(write())
        await asyncio.sleep(5.0)
        task.cancel()
        with pytest.raises(CancelledByPeerError):
            await task

    run(main())


def test_an_error_with_which_a_write_answers_its_cancellation_passes() -> None:
    async def write() -> None:
        with closing(WriteDeadline(10.0)) as deadline, deadline:
            try:
                await asyncio.sleep(1000.0)
            except asyncio.CancelledError:
                raise ConnectionResetError from None

    with pytest.raises(ConnectionResetError):
        run(write())


def test_an_error_of_the_write_passes() -> None:
    async def write() -> None:
        with closing(WriteDeadline(10.0)) as deadline, deadline:
            raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        run(write())


def test_a_writer_that_was_cut_off_is_forgotten() -> None:
    """At once, and with all that its frames refer to: full collections of garbage are rare."""

    async def write() -> None:
        with closing(WriteDeadline(10.0)) as deadline, deadline:
            await asyncio.sleep(1000.0)

    async def main() -> "weakref.ref[asyncio.Task[None]]":
        task = asyncio.ensure_future(write())
        await asyncio.sleep(5.0)
        task.cancel()
        await asyncio.wait([task])
        return weakref.ref(task)

    gc.collect()
    gc.disable()
    try:
        assert run(main())() is None
    finally:
        gc.enable()
