"""Waiting for what may not be interrupted."""

import asyncio

from kvrelay.core.tasks import uninterrupted

TIMEOUT = 10.0


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
