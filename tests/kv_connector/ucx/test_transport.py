"""The waits for what was posted on a link: they may begin late, end early, or not be interrupted."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from kv_connector.ucx import transport as transport_module
from kv_connector.ucx.transport import Link, LinkLostError, Transport
from kvrelay.core.errors import ConfigurationError
from tests.kv_connector.ucx.stubborn_request import StubbornRequest

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


async def test_ucx_sleeps_when_it_finds_nothing_to_do(link: Link) -> None:
    """Turns for nothing would take a core from the engine."""
    transport = link._transport
    async with asyncio.timeout(TIMEOUT):
        for _ in range(20):
            transport.kick()
            while transport._next_turn is not None:
                await asyncio.sleep(0)


async def test_a_wait_whose_caller_has_left_holds_up_no_other(link: Link) -> None:
    waiting = asyncio.create_task(link.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    link._transport._turn()  # before the cancelled task gets its own
    await asyncio.wait([waiting], timeout=TIMEOUT)
    assert waiting.cancelled()
    link.greet(bytes(8))
    await asyncio.wait_for(link.wait(), TIMEOUT)


async def test_a_wait_that_ends_with_an_error_does_not_break_the_turn_of_ucx() -> None:
    """Others would learn nothing of what has ended in that turn."""
    loop = asyncio.get_running_loop()
    broken: list[object] = []
    loop.set_exception_handler(lambda loop, context: broken.append(context))
    transport, peers = Transport(""), Transport("")
    accepted: list[Link] = []
    listener, port = peers.listen(accepted.append)
    link = transport.connect("127.0.0.1", port)
    greeting = asyncio.create_task(link.greeting(8))
    async with asyncio.timeout(TIMEOUT):
        while not accepted:
            await asyncio.sleep(0)
        accepted[0].cut()
        with pytest.raises(LinkLostError):
            await greeting
    assert not broken
    del listener
    for each in (link, *accepted):
        await each.close()
    transport.close()
    peers.close()


async def test_what_has_arrived_when_another_link_is_cut_is_noticed_at_once(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cutting has UCX handle all that has come, after which there is no event for it any more."""
    monkeypatch.setattr(transport_module, "_GUARD_SECONDS", 60.0)
    transport, peers = link._transport, Transport("")
    accepted: list[Link] = []
    listener, port = peers.listen(accepted.append)
    other = transport.connect("127.0.0.1", port)
    other.greet(bytes(8))
    await asyncio.wait_for(other.wait(), TIMEOUT)
    greeting = asyncio.create_task(other.greeting(8))
    async with asyncio.timeout(TIMEOUT):
        while not accepted or other not in transport._waiting or transport._next_turn is not None:
            await asyncio.sleep(0)
    asyncio.get_running_loop().remove_reader(transport._fd)  # as if all had come in this very moment
    accepted[0].greet(b"12345678")
    await asyncio.wait_for(accepted[0].wait(), TIMEOUT)
    assert not greeting.done()
    await link.close()
    assert await asyncio.wait_for(greeting, TIMEOUT) == b"12345678"
    del listener
    for each in (other, *accepted):
        await each.close()
    peers.close()


async def test_whoever_waits_for_a_link_that_is_cut_is_told_even_when_the_transport_is_closed_next(link: Link) -> None:
    greeting = asyncio.create_task(link.greeting(8))
    await asyncio.sleep(0)
    link.cut()
    link._transport.close()
    with pytest.raises(LinkLostError, match="the connection was cut"):
        await asyncio.wait_for(greeting, TIMEOUT)
    with pytest.raises(LinkLostError, match="the connector was closed"):
        link._transport.connect("127.0.0.1", 1)


async def test_ucx_gets_turns_until_it_lets_go_of_a_link_that_was_cut(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have cancellations left to do when nothing comes for it any more."""
    stubborn, transport, flush = StubbornRequest(), link._transport, link._transport.flush
    link._posted.append((stubborn, None, None))
    num_flushed = 0

    def flush_and_let_go_at_last() -> None:
        nonlocal num_flushed
        num_flushed += 1
        stubborn.completed = num_flushed > 2
        flush()

    monkeypatch.setattr(transport, "flush", flush_and_let_go_at_last)
    closing = asyncio.create_task(link.close())
    ended, _ = await asyncio.wait([closing], timeout=TIMEOUT)
    stubborn.completed = True
    await closing
    assert ended


async def test_a_ucx_that_does_not_start_is_a_matter_of_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "no_such_transport")
    with pytest.raises(ConfigurationError, match=r"UCX does not start \(network devices 'lo'\): No such device"):
        Transport("lo")
