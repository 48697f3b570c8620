"""Comments in streams that wait for their next event: when they come, and who has to bear with them."""

import asyncio
import json
from collections.abc import AsyncGenerator

import httpx
import openai
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from kvrelay.bench.sse import SseParser
from router.edge.http_exchange import EventStream
from router.edge.idle_comments import COMMENT, COMMENT_SECONDS
from tests.router.edge.edge_parts import http_server
from tests.simulation.virtual_loop import VirtualLoop

PATIENCE = 10.0
SHORT, LONG = 0.001, 1000.0
CHUNK = {"id": "1", "object": "text_completion", "created": 1, "model": "m"}
EVENTS = [
    b"data: %s\n\n" % json.dumps(CHUNK | {"choices": [{"index": 0, "text": text, "finish_reason": None}]}).encode()
    for text in ("Paris", " is")
]
DONE = b"data: [DONE]\n\n"


class Client:
    """A client that stays, of whose stream every message is kept. From message `stuck_at` on, it takes nothing until
    `takes` is set."""

    def __init__(self, stuck_at: int | None = None) -> None:
        self.sent: list[bytes] = []
        self.takes = asyncio.Event()
        self._stuck_at = stuck_at
        self._changed = asyncio.Condition()
        self.num_waiting = 0

    async def receive(self) -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(self, message: Message) -> None:
        if len(self.sent) == self._stuck_at:
            self.num_waiting += 1
            async with self._changed:
                self._changed.notify_all()
            try:
                await self.takes.wait()
            finally:
                self.num_waiting -= 1
        if message["type"] == "http.response.body":
            self.sent.append(message["body"])
            async with self._changed:
                self._changed.notify_all()

    async def until_sent(self, num_messages: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.sent) >= num_messages)

    async def until_stuck(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.num_waiting > 0)


async def streamed(client: Client, events: AsyncGenerator[bytes, None], *, write_timeout: float = LONG) -> None:
    stream = EventStream(events, write_timeout=write_timeout, comment_seconds=SHORT)
    before = asyncio.all_tasks()
    async with asyncio.timeout(PATIENCE):
        await stream({"type": "http"}, client.receive, client.send)
    assert asyncio.all_tasks() <= before, "no comment outlives its stream"


async def test_a_stream_that_has_begun_gets_comments_while_it_waits_and_then_its_events() -> None:
    client = Client()

    async def events() -> AsyncGenerator[bytes, None]:
        yield EVENTS[0]
        await client.until_sent(4)
        yield EVENTS[1]
        await client.until_sent(len(client.sent) + 2)
        yield DONE

    await streamed(client, events())
    assert [sent for sent in client.sent if sent != COMMENT] == [EVENTS[0], EVENTS[1], DONE, b""]
    assert client.sent[:4] == [EVENTS[0], COMMENT, COMMENT, COMMENT]
    assert client.sent[-4:] == [COMMENT, COMMENT, DONE, b""]


def test_events_that_keep_coming_have_no_comment_between_them() -> None:
    async def streams() -> list[bytes]:
        client = Client()

        async def events() -> AsyncGenerator[bytes, None]:
            for _ in range(10):
                yield EVENTS[0]
                await asyncio.sleep(0.9 * COMMENT_SECONDS)

        await EventStream(events())({"type": "http"}, client.receive, client.send)
        return client.sent

    loop = VirtualLoop()  # in which sleeping takes no real time
    try:
        assert loop.run_until_complete(streams()) == [EVENTS[0]] * 10 + [b""]
    finally:
        loop.close()


async def test_before_the_first_event_nothing_is_sent() -> None:
    """An error has a status of its own until then."""
    client = Client()
    took_time = asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        asyncio.get_running_loop().call_later(20 * SHORT, took_time.set)
        await took_time.wait()
        assert client.sent == []
        yield DONE

    await streamed(client, events())
    assert client.sent == [DONE, b""]


@pytest.mark.parametrize("rest", [[EVENTS[1], DONE], []], ids=["events", "the end"])
async def test_a_comment_that_the_client_does_not_take_makes_way_for(rest: list[bytes]) -> None:
    client = Client(stuck_at=1)

    async def events() -> AsyncGenerator[bytes, None]:
        yield EVENTS[0]
        await client.until_stuck()  # with the comment
        asyncio.get_running_loop().call_later(SHORT, client.takes.set)
        for event in rest:
            yield event

    await streamed(client, events())
    assert client.sent == [EVENTS[0], *rest, b""]


async def test_a_client_that_takes_nothing_of_an_event_is_disconnected_although_comments_are_due() -> None:
    client = Client(stuck_at=1)
    closed = asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            yield EVENTS[0]
            await client.until_stuck()
            yield EVENTS[1]
        finally:
            closed.set()

    await streamed(client, events(), write_timeout=20 * SHORT)
    assert client.sent == [EVENTS[0]]
    assert closed.is_set() and client.num_waiting == 0


async def test_a_large_event_has_no_comment_between_its_parts() -> None:
    large = b"data: %b\n\n" % (b"x" * 200_000)
    client = Client(stuck_at=2)  # in the middle of it

    async def events() -> AsyncGenerator[bytes, None]:
        yield EVENTS[0]
        yield large

    streaming = asyncio.create_task(streamed(client, events()))
    await asyncio.wait_for(client.until_stuck(), PATIENCE)
    waited = asyncio.Event()
    asyncio.get_running_loop().call_later(20 * SHORT, waited.set)
    await waited.wait()
    assert client.num_waiting == 1, "the part alone"
    client.takes.set()
    await streaming
    assert large in b"".join(client.sent)


async def test_the_clients_of_openai_and_of_our_benchmark_read_past_comments() -> None:
    num_comments = 0

    async def answer(request: Request) -> Response:
        counted, seen = asyncio.Event(), 0

        async def events() -> AsyncGenerator[bytes, None]:
            yield EVENTS[0]
            await counted.wait()
            yield EVENTS[1]
            yield DONE

        class Counting(EventStream):
            async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
                async def counting(message: Message) -> None:
                    nonlocal num_comments, seen
                    await send(message)
                    if message.get("body") == COMMENT:
                        num_comments, seen = num_comments + 1, seen + 1
                    if seen == 3:
                        counted.set()

                await super().__call__(scope, receive, counting)

        return Counting(events(), comment_seconds=SHORT)

    async with (
        http_server(Starlette(routes=[Route("/v1/completions", answer, methods=["POST"])])) as port,
        asyncio.timeout(PATIENCE),
    ):
        url = f"http://127.0.0.1:{port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            stream = await client.completions.create(model="m", prompt="x", stream=True)
            assert [chunk.choices[0].text async for chunk in stream] == ["Paris", " is"]
        parser, found = SseParser(), list[bytes]()
        async with httpx.AsyncClient() as http, http.stream("POST", f"{url}/completions", json={}) as response:
            async for data in response.aiter_bytes():
                found += parser.feed(data)
        assert [b"data: %s\n\n" % payload for payload in found] == [*EVENTS, DONE]
    assert num_comments >= 6
