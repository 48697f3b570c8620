"""The waits for what was posted on a link: they may begin late, end early, or not be interrupted."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from kv_connector.ucx.transport import Link, Transport, uninterrupted

TIMEOUT = 10.0


@pytest.fixture
async def link() -> AsyncIterator[Link]:
    """A link to a listener that takes everything, over which one message has been sent: nobody has waited for it."""
    transport = Transport("")
    accepted: list[Link] = []
    listener, port = transport.listen(accepted.append)
    made = transport.connect("127.0.0.1", port)
    made.greet(bytes(8))
    async with asyncio.timeout(TIMEOUT):
        while not (accepted and made._posted[0][0].completed):
            await asyncio.sleep(0)
    yield made
    del listener
    for each in (made, *accepted):
        await each.close()
    transport.close()


async def test_a_wait_for_what_has_ended_already_needs_no_event(link: Link) -> None:
    transport = link._transport
    asyncio.get_running_loop().remove_reader(transport._fd)
    while transport._next_turn is not None:
        await asyncio.sleep(0)
    await asyncio.wait_for(link.wait(), TIMEOUT)


async def test_a_wait_whose_caller_has_left_holds_up_no_other(link: Link) -> None:
    waiting = asyncio.create_task(link.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    link._transport._turn()  # before the cancelled task gets its own
    await asyncio.wait([waiting], timeout=TIMEOUT)
    assert waiting.cancelled()
    link.greet(bytes(8))
    await asyncio.wait_for(link.wait(), TIMEOUT)


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
