"""An HTTP exchange with a client that neither reads nor leaves."""

import asyncio
import socket
from collections.abc import AsyncGenerator

import pytest
from starlette.types import Message, Receive, Scope, Send

from router.edge.http_exchange import EventStream, until_disconnect
from tests.router.edge_parts import http_server

PATIENCE = 10.0


@pytest.mark.parametrize("num_wanted", [1, 3])
async def test_a_client_that_takes_nothing_counts_as_disconnected(num_wanted: int) -> None:
    closed = asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"data: x\n\n"
        finally:
            closed.set()

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    num_taken = 0

    async def send(message: Message) -> None:
        nonlocal num_taken
        num_taken += 1
        if num_taken > num_wanted:
            await asyncio.Event().wait()

    async with asyncio.timeout(PATIENCE):
        await EventStream(events(), write_timeout=0.01)({"type": "http"}, receive, send)
    assert closed.is_set() and num_taken == num_wanted + 1


async def test_when_work_has_ended_nobody_waits_for_a_disconnect() -> None:
    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def work() -> str:
        return "done"

    before = asyncio.all_tasks()
    assert await until_disconnect(receive, work()) == "done"
    assert asyncio.all_tasks() == before


async def test_the_connection_of_a_client_that_takes_nothing_is_dropped_with_what_it_buffers() -> None:
    """If it were closed, it would stay until the client has taken the rest."""
    last_message: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

    async def events() -> AsyncGenerator[bytes, None]:
        while True:
            yield b"x" * (1 << 20)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await EventStream(events(), write_timeout=0.1)(scope, receive, send)
        last_message.set_result(await receive())

    async with http_server(app) as port:
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert await asyncio.wait_for(last_message, PATIENCE) == {"type": "http.disconnect"}
