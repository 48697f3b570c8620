"""Tasks that fail unforeseen, and waiting: for the first of several things, and for what may not be interrupted."""

import asyncio

import pytest

from kvrelay.core.tasks import begin_task, end_tasks, first_of, uninterrupted

TIMEOUT = 10.0


async def test_a_task_that_fails_is_logged_at_once_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise ValueError("a fault of ours")

    failure: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    task = begin_task(fail(), name="sweeper", on_failure=failure.set_result)
    assert isinstance(await asyncio.wait_for(failure, TIMEOUT), ValueError)
    assert caplog.messages == ["the task 'sweeper' has failed"]
    assert "a fault of ours" in caplog.text
    await end_tasks(task)


async def test_a_task_that_is_ended_or_returns_has_not_failed(caplog: pytest.LogCaptureFixture) -> None:
    failures: list[BaseException] = []
    endless = begin_task(Endless().wait(), name="endless", on_failure=failures.append)
    begin_task(asyncio.sleep(0), name="short", on_failure=failures.append)
    await asyncio.sleep(0)
    await end_tasks(endless, None)
    await asyncio.sleep(0)
    assert (failures, caplog.messages) == ([], [])


async def test_a_caller_that_may_not_be_interrupted_is_cancelled_afterwards() -> None:
    is_quiet = asyncio.Event()

    async def quieten() -> None:
        await is_quiet.wait()

    caller = asyncio.create_task(uninterrupted(quieten()))
    for _ in range(3):
        await asyncio.sleep(0)
        caller.cancel()
    await asyncio.sleep(0)
    assert not caller.done()
    is_quiet.set()
    await asyncio.wait([caller], timeout=TIMEOUT)
    assert caller.cancelled()


class Endless:
    """Waits for ever, and notes when it has ended, some turns after it was cancelled."""

    def __init__(self) -> None:
        self.has_ended = False

    async def wait(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(10):
                await asyncio.sleep(0)
            self.has_ended = True


async def test_the_first_of_several_is_named_once_the_others_have_ended() -> None:
    before, behind = Endless(), Endless()
    assert await asyncio.wait_for(first_of(before.wait(), asyncio.sleep(0), behind.wait()), TIMEOUT) == 1
    assert before.has_ended and behind.has_ended


async def test_a_wait_for_the_first_of_several_that_is_cancelled_leaves_none_of_them() -> None:
    endless = [Endless(), Endless()]
    waiting = asyncio.create_task(first_of(*(each.wait() for each in endless)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting], timeout=TIMEOUT)
    assert waiting.cancelled() and all(each.has_ended for each in endless)


async def test_what_the_first_of_several_raises_is_raised_once_the_others_have_ended() -> None:
    """Also those behind it."""
    before, behind = Endless(), Endless()

    async def fail() -> None:
        raise ValueError("failed")

    with pytest.raises(ValueError, match="failed"):
        await asyncio.wait_for(first_of(before.wait(), fail(), behind.wait()), TIMEOUT)
    assert before.has_ended and behind.has_ended
