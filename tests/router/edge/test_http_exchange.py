"""An HTTP exchange with a client that neither reads nor leaves, or sends too slowly."""

import asyncio
import json
import socket
import threading
import tracemalloc
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from kvrelay.text.tokenizer import LONG_TEXT_CHARS, Tokenizer
from router.edge.body_budget import BodyBudget
from router.edge.http_exchange import BODY_BYTES_PER_SECOND, EventStream, read_json_body
from router.edge.http_protocol import ABORT, MAX_WAITING
from router.edge.presence import Presence
from tests.router.edge.edge_parts import ScriptedRelay, http_server
from tests.router.edge.gateway_client import serving

PATIENCE = 10.0
IGNORED = "x" * 900_000  # in a field that is not known


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


async def test_a_large_event_is_sent_in_parts_that_each_have_their_time() -> None:
    large = b"data: %b\n\n" % (b"0123456789" * 100_000)
    sent: list[bytes] = []

    async def events() -> AsyncGenerator[bytes, None]:
        for event in (large, b"small", large):
            yield event

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            sent.append(message["body"])

    await EventStream(events())({"type": "http"}, receive, send)
    assert b"".join(sent) == large + b"small" + large
    assert max(map(len, sent)) == 64 << 10 and b"small" in sent


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


# With buffers as large as the system likes, a server could send again only after a client has read megabytes.
_ROOM_BYTES = 32 << 10


def _connected_with_little_room(port: int) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _ROOM_BYTES)
    client.connect(("127.0.0.1", port))
    return client


@pytest.mark.parametrize("connection", [b"keep-alive", b"close"])
async def test_so_is_that_of_a_client_that_takes_nothing_of_a_whole_answer(connection: bytes) -> None:
    """One that takes a little at a time gets all of it, however long that takes."""
    num_bytes, head = 16 << 20, b"GET / HTTP/1.1\r\nhost: x\r\nconnection: %s\r\n\r\n" % connection
    transports: list[asyncio.Transport] = []

    async def answer(request: Request) -> Response:
        transports.append(request.scope["state"][ABORT].__self__)
        transports[-1].get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM_BYTES)
        return Response(bytes(num_bytes))

    async with (
        http_server(Starlette(routes=[Route("/", answer)]), idle_seconds=1) as port,
        asyncio.timeout(PATIENCE),
    ):
        with _connected_with_little_room(port) as stuck:
            stuck.sendall(head)
            reader, writer = await asyncio.open_connection(sock=_connected_with_little_room(port))
            writer.write(head)
            await reader.readuntil(b"\r\n\r\n")
            num_taken = 0
            while transports[0].get_write_buffer_size():
                num_taken += len(await reader.readexactly(1 << 15))
                await asyncio.sleep(0.01)
            await reader.readexactly(num_bytes - num_taken)
            writer.close()


@asynccontextmanager
async def reading_bodies(seconds: float) -> AsyncIterator[int]:
    """Runs a server that answers a POST with the number of its bytes, and yields the port."""

    budget = BodyBudget(1 << 30)

    async def count(request: Request) -> Response:
        with budget.share() as share:
            return Response(str(len(await read_json_body(request, 1 << 30, share, seconds=seconds))))

    async with http_server(Starlette(routes=[Route("/", count, methods=["POST"])])) as port:
        yield port


HEAD = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"


async def test_a_body_that_does_not_come_is_answered_with_408_and_the_connection_closed() -> None:
    """One that comes faster than it has to gets longer."""
    num_bytes = 60 * BODY_BYTES_PER_SECOND
    async with reading_bodies(seconds=0.3) as port:
        fast, send_fast = await asyncio.open_connection("127.0.0.1", port)
        send_fast.write(HEAD % num_bytes + b"x" * (num_bytes - 1))
        await send_fast.drain()
        slow, send_slow = await asyncio.open_connection("127.0.0.1", port)
        send_slow.write(HEAD % num_bytes + b"x")
        answer = await asyncio.wait_for(slow.read(), PATIENCE)
        assert answer.startswith(b"HTTP/1.1 408") and b"within 0.3 s" in answer
        send_fast.write(b"x")
        assert (await asyncio.wait_for(fast.readline(), PATIENCE)).startswith(b"HTTP/1.1 200")
        send_slow.close()
        send_fast.close()


@dataclass
class WaitingServer:
    """A server that answers `GET /wait` when it may."""

    port: int = 0
    began: asyncio.Event = field(default_factory=asyncio.Event)
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait(self, request: Request) -> Response:
        self.began.set()
        try:
            with Presence.of(request.scope):
                await self.may_answer.wait()
        finally:
            self.ended.set()
        return Response("waited")


@asynccontextmanager
async def waiting_server(**settings: int) -> AsyncIterator[WaitingServer]:
    server = WaitingServer()
    async with http_server(Starlette(routes=[Route("/wait", server.wait)]), **settings) as server.port:
        yield server


WAIT = b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n"


async def test_a_connection_without_a_whole_head_is_closed_after_a_while_and_one_with_a_request_is_not() -> None:
    parts = {
        b"": b"",
        b"GET /wait HTTP/1.1\r\n": b"",
        b"GET /nothing HTTP/1.1\r\nhost: x\r\n\r\nGET": b"HTTP/1.1 404",
        b"POST /nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{": b"HTTP/1.1 404",
    }

    async def until_closed(port: int, sent: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        answer = await asyncio.wait_for(reader.read(), PATIENCE)
        writer.close()
        return answer

    async with waiting_server(idle_seconds=1) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(WAIT)
        answers = await asyncio.gather(*(until_closed(server.port, part) for part in parts))
        assert [answer[:12] for answer in answers] == list(parts.values())
        server.may_answer.set()
        assert (await asyncio.wait_for(reader.readline(), PATIENCE)).startswith(b"HTTP/1.1 200")
        writer.close()


@pytest.mark.parametrize("num_more", [0, 1, MAX_WAITING - 1])
@pytest.mark.parametrize("at_once", [True, False])
async def test_a_client_that_leaves_aborts_its_request_although_it_has_sent_more(num_more: int, at_once: bool) -> None:
    async with waiting_server() as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(WAIT * (1 + num_more if at_once else 1))
        await asyncio.wait_for(server.began.wait(), PATIENCE)
        if not at_once:
            writer.write(WAIT * num_more)
        writer.close()
        await asyncio.wait_for(server.ended.wait(), PATIENCE)


async def test_however_many_requests_are_sent_at_once_few_wait_and_all_are_answered_in_turn() -> None:
    read_bytes, request_bytes, num_requests = 256 << 10, 2 << 10, 1000
    most_waiting = 0

    async def answer(request: Request) -> Response:
        nonlocal most_waiting
        connection = request.scope["state"][ABORT].__self__.get_protocol()
        most_waiting = max(most_waiting, len(connection.pipeline))
        return Response(request.url.path)

    paths = [f"/{i:06}".encode() for i in range(num_requests)]
    async with http_server(Starlette(routes=[Route("/{number}", answer)])) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"".join(b"GET %s HTTP/1.1\r\nx: %s\r\n\r\n" % (path, b"x" * request_bytes) for path in paths))
        for path in paths:
            assert (await asyncio.wait_for(reader.readuntil(path), PATIENCE)).startswith(b"HTTP/1.1 200")
        writer.close()
    assert most_waiting <= MAX_WAITING + read_bytes // request_bytes


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_stream_for_a_client_of_http_1_0_ends_with_the_connection_instead_of_having_chunks(
    tokenizer: Tokenizer, version: str
) -> None:
    """nginx speaks HTTP/1.0 with the servers behind it unless told otherwise."""
    body = json.dumps({"prompt": "hello", "stream": True}).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    async with serving(ScriptedRelay(tokenizer)) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(head.encode() + body)
        answer = await asyncio.wait_for(reader.read(), PATIENCE)
        writer.close()
    fields, _, events = answer.partition(b"\r\n\r\n")
    assert fields.startswith(b"HTTP/1.1 200")
    chunked = version != "1.0"
    assert (b"transfer-encoding" in fields, b"\r\n" in events) == (chunked, chunked)
    lines = [line for line in events.split(b"\n") if line.startswith(b"data: ")]
    assert lines[-1] == b"data: [DONE]"
    if not chunked:
        assert events == b"\n\n".join([*lines, b""])


@pytest.mark.parametrize(("num_prompts", "num_tokens"), [(1, 1), (1, 3), (2, 1), (2, 3)])
async def test_a_client_has_each_token_before_the_next_one_comes(
    num_prompts: int, num_tokens: int, tokenizer: Tokenizer
) -> None:
    relay = ScriptedRelay(tokenizer, hang_at=num_tokens)
    tokens = await tokenizer.encode(relay.reply, add_special_tokens=False)
    before = [tokenizer.decode(tokens[:num_tokens], skip_special_tokens=True)] * num_prompts
    body = {"prompt": ["hello"] * num_prompts, "max_tokens": 50, "stream": True}
    texts = [""] * num_prompts
    async with serving(relay) as gateway, asyncio.timeout(PATIENCE):
        async with gateway.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            while texts != before:
                if event := (await anext(lines)).removeprefix("data: "):
                    (choice,) = json.loads(event)["choices"]
                    texts[choice["index"]] += choice["text"]


async def test_what_is_not_streamed_has_a_length_for_a_client_of_http_1_0_too(tokenizer: Tokenizer) -> None:
    async with serving(ScriptedRelay(tokenizer)) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(b"GET /v1/models HTTP/1.0\r\n\r\n")
        head, _, body = (await asyncio.wait_for(reader.read(), PATIENCE)).partition(b"\r\n\r\n")
        writer.close()
    assert json.loads(body)["object"] == "list"
    assert b"content-length: %d" % len(body) in head.split(b"\r\n")


class _Busy(ThreadPoolExecutor):
    """Threads of which none is free until `free` is called. `waits` is set when something waits for one."""

    def __init__(self) -> None:
        self.waits = asyncio.Event()
        self.work: list[Future[Any]] = []
        super().__init__(max_workers=1)
        self._may_work = threading.Event()
        super().submit(self._may_work.wait)

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        self.waits.set()
        self.work.append(super().submit(*args, **kwargs))
        return self.work[-1]

    def free(self) -> None:
        self._may_work.set()


@pytest.mark.parametrize(
    ("path", "more"), [("/v1/completions", {}), ("/v1/completions", {"stream": True}), ("/tokenize", {})]
)
async def test_the_prompt_of_a_client_that_has_left_is_not_tokenised(
    tokenizer: Tokenizer, path: str, more: dict[str, object]
) -> None:
    """Otherwise the long prompts of all others would wait for it."""
    threads = _Busy()
    asyncio.get_running_loop().set_default_executor(threads)
    body = json.dumps({"prompt": "x" * (LONG_TEXT_CHARS + 1), **more}).encode()
    try:
        async with serving(ScriptedRelay(tokenizer)) as gateway:
            _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(b"POST %s HTTP/1.1\r\ncontent-length: %d\r\n\r\n%s" % (path.encode(), len(body), body))
            await asyncio.wait_for(threads.waits.wait(), PATIENCE)
            writer.close()
            async with asyncio.timeout(PATIENCE):
                while not all(future.cancelled() for future in threads.work):
                    await asyncio.sleep(0.001)
            assert gateway.relay.requests == []
    finally:
        threads.free()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hello", "ignored": IGNORED}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello", "ignored": IGNORED}]}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello", "ignored": IGNORED}]}]},
        ),
    ],
    ids=["the body", "a message", "a part"],
)
async def test_what_a_body_had_is_not_kept_while_its_request_runs(
    tokenizer: Tokenizer, path: str, body: dict[str, object], stream: bool
) -> None:
    relay = ScriptedRelay(tokenizer, hang_at=0)
    async with serving(relay) as gateway:
        tracemalloc.start()
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            data = json.dumps(body | {"stream": stream}).encode()
            writer.write(b"POST %s HTTP/1.1\r\ncontent-length: %d\r\n\r\n%s" % (path.encode(), len(data), data))
            del data
            async with asyncio.timeout(PATIENCE):
                await writer.drain()
                while not relay.num_running:
                    await asyncio.sleep(0.001)
            assert tracemalloc.get_traced_memory()[0] < len(IGNORED)
            writer.close()
        finally:
            tracemalloc.stop()
