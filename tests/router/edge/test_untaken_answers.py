"""Whole answers that clients take slowly or not at all: how much memory they have together, and for how long."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, suppress

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message

from kvrelay.text.tokenizer import Tokenizer
from router.edge.http_exchange import WholeAnswer
from router.edge.http_protocol import ABORT
from router.edge.untaken_answers import UntakenAnswers
from tests.router.edge.edge_parts import ScriptedRelay, http_server
from tests.router.edge.gateway_client import CHAT, COMPLETION, serving
from tests.router.scripted_nodes import PATIENCE, until

MIB = 1 << 20
NUM_BYTES = 16 * MIB  # more than the system keeps for a connection
GET = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


def test_the_oldest_make_room_for_the_newest() -> None:
    untaken, dropped = UntakenAnswers(10), list[str]()

    def hold(stack: ExitStack, name: str, num_bytes: int) -> None:
        stack.enter_context(untaken.holding(num_bytes, lambda: dropped.append(name)))

    with ExitStack() as others, ExitStack() as stack:
        hold(others, "a", 4)
        hold(others, "b", 4)
        hold(stack, "c", 2)
        assert (untaken.num_bytes, dropped) == (10, [])
        hold(stack, "d", 3)
        assert (untaken.num_bytes, dropped) == (9, ["a"])
        others.close()
        assert untaken.num_bytes == 5, "what was dropped is not counted out again"
        hold(stack, "larger than all may be", 11)
        assert (untaken.num_bytes, dropped) == (11, ["a", "c", "d"])
        hold(stack, "e", 1)
        assert (untaken.num_bytes, dropped[3:]) == (1, ["larger than all may be"])
    assert untaken.num_bytes == 0


@asynccontextmanager
async def answering(untaken: UntakenAnswers, num_bytes: int = NUM_BYTES) -> AsyncIterator[int]:
    """Runs a server that answers every GET with so many bytes, and yields the port."""

    async def answer(request: Request) -> Response:
        return WholeAnswer(b"x" * num_bytes, untaken)

    async with http_server(Starlette(routes=[Route("/", answer)])) as port:
        yield port


async def asked(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Returns the connection of a client that has read the head of its answer, and as yet little else."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 << 10)
    client.connect(("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=client)
    writer.write(GET)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    return reader, writer


async def test_an_answer_that_waits_longest_is_dropped_with_its_connection_if_there_are_too_many() -> None:
    untaken = UntakenAnswers(NUM_BYTES + MIB)
    async with answering(untaken) as port, asyncio.timeout(PATIENCE):
        stuck, stuck_writer = await asked(port)
        assert untaken.num_bytes == NUM_BYTES
        reader, writer = await asked(port)
        assert untaken.num_bytes == NUM_BYTES
        assert len(await reader.read(-1)) == NUM_BYTES
        await until(lambda: untaken.num_bytes == 0)
        taken = b""
        with suppress(ConnectionError):
            taken = await stuck.read(-1)
        assert len(taken) < NUM_BYTES
        writer.close()
        stuck_writer.close()


async def test_an_answer_that_a_client_leaves_counts_no_longer() -> None:
    untaken = UntakenAnswers(10 * NUM_BYTES)
    async with answering(untaken) as port, asyncio.timeout(PATIENCE):
        _, writer = await asked(port)
        _, other = await asked(port)
        assert untaken.num_bytes == 2 * NUM_BYTES
        writer.close()
        await until(lambda: untaken.num_bytes == NUM_BYTES)
        other.close()
        await until(lambda: untaken.num_bytes == 0)


async def test_small_answers_do_not_count() -> None:
    untaken = UntakenAnswers(1)
    async with answering(untaken, 64 << 10) as port, asyncio.timeout(PATIENCE):
        connections = [await asked(port) for _ in range(3)]
        assert untaken.num_bytes == 0
        for reader, writer in connections:
            assert len(await reader.read(-1)) == 64 << 10
            writer.close()


@pytest.mark.parametrize("num_wanted", [0, 1, 3])
async def test_a_client_that_takes_nothing_of_a_large_answer_is_disconnected(num_wanted: int) -> None:
    untaken, dropped, num_taken = UntakenAnswers(NUM_BYTES), asyncio.Event(), 0

    async def receive() -> Message:
        await dropped.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        nonlocal num_taken
        num_taken += 1
        if num_taken > num_wanted:
            assert untaken.num_bytes == MIB
            await asyncio.Event().wait()

    answer = WholeAnswer(bytes(MIB), untaken, write_timeout=0.01)
    async with asyncio.timeout(PATIENCE):
        await answer({"type": "http", "state": {ABORT: dropped.set}}, receive, send)
    assert dropped.is_set() and (num_taken, untaken.num_bytes) == (num_wanted + 1, 0)


async def test_a_client_that_still_reads_when_the_server_stops_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    untaken = UntakenAnswers(NUM_BYTES)
    async with asyncio.timeout(PATIENCE):
        async with answering(untaken) as port:
            _, writer = await asked(port)
        await until(lambda: untaken.num_bytes == 0)
        writer.close()
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", COMPLETION | {"prompt": "x" * 80_000, "echo": True, "max_tokens": 1}),
        ("/v1/chat/completions", CHAT | {"n": 64, "logprobs": True, "top_logprobs": 20}),
        ("/tokenize", {"prompt": "x" * 80_000}),
        ("/detokenize", {"tokens": [5] * 80_000}),
    ],
)
async def test_every_large_answer_counts_and_is_whole(
    path: str, body: dict[str, object], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    holding, held = UntakenAnswers.holding, list[int]()

    def noted(self: UntakenAnswers, num_bytes: int, drop: Callable[[], object]) -> AbstractContextManager[None]:
        held.append(num_bytes)
        return holding(self, num_bytes, drop)

    monkeypatch.setattr(UntakenAnswers, "holding", noted)
    async with serving(ScriptedRelay(tokenizer, max_model_len=10**6)) as gateway:
        answer = await gateway.post(path, body)
    assert answer.status_code == 200 and answer.json()
    assert answer.headers["content-type"] == "application/json"
    assert held == [len(answer.content)]
