"""An HTTP exchange with a client that neither reads nor leaves."""

import asyncio
from collections.abc import AsyncGenerator

from starlette.types import Message

from router.edge.http_exchange import EventStream

PATIENCE = 10.0


async def test_a_client_that_takes_nothing_counts_as_disconnected() -> None:
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
        if num_taken > 3:
            await asyncio.Event().wait()

    async with asyncio.timeout(PATIENCE):
        await EventStream(events(), write_timeout=0.01)({"type": "http"}, receive, send)
    assert closed.is_set() and num_taken == 4
