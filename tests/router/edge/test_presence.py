"""Work ends with the client that wants it."""

import asyncio
import json

import pytest

from kvrelay.core.errors import CancelledByPeerError, UnavailableError
from kvrelay.text.tokenizer import Tokenizer
from router.edge.presence import PRESENCE, Presence
from tests.router.edge.edge_parts import ScriptedRelay
from tests.router.edge.gateway_client import COMPLETION, serving

PATIENCE = 10.0


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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_bytes", [10, 100_000, 300_000])
async def test_a_client_that_leaves_behind_a_body_of_any_size_ends_its_request(
    tokenizer: Tokenizer, num_bytes: int, stream: bool
) -> None:
    """uvicorn stops reading a connection when much of a body comes at once, and would not see that it is closed."""
    relay = ScriptedRelay(tokenizer, hang_at=1)
    body = json.dumps(COMPLETION | {"stream": stream, "ignored": "x" * num_bytes}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-type: application/json\r\n"
    async with serving(relay) as gateway, asyncio.timeout(PATIENCE):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(head + b"content-length: %d\r\n\r\n" % len(body))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")  # the gateway waits for the body
        writer.write(body)
        await relay.capacity_checked.wait()
        writer.close()
        await relay.closed.wait()
