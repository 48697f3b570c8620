"""An answer over HTTP is whole with its last event, whatever the server does with the connection."""

import asyncio
from typing import Literal

import pytest

from kvrelay.bench import openai_client
from kvrelay.bench.base import Answer, Generation
from kvrelay.bench.openai_client import OpenAIClient
from kvrelay.core.clock import MonotonicClock
from tests.bench.servers import DONE, LAST, PIECE, USAGE

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = PIECE + LAST + USAGE + DONE


@pytest.mark.parametrize(("end", "num_connections"), [("comes later", 1), ("is cut off", 2), ("never comes", 2)])
async def test_the_end_of_the_response_only_decides_about_the_connection(
    end: Literal["comes later", "is cut off", "never comes"], num_connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if end == "never comes":
        monkeypatch.setattr(openai_client, "_END_SECONDS", 0.1)
    answers = [Answer(), Answer()]
    is_whole = asyncio.Event()
    ports: set[int] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ports.add(writer.get_extra_info("peername")[1])
        while await reader.readline():
            length = int((await reader.readuntil(b"\r\n\r\n")).lower().partition(b"content-length:")[2].split()[0])
            await reader.readexactly(length)
            writer.write(HEAD + b"%x\r\n%s\r\n" % (len(EVENTS), EVENTS))
            if end == "is cut off":
                break
            if end == "comes later":
                await is_whole.wait()
                writer.write(b"0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        client = OpenAIClient(url, "completions", Generation(0.0, True, timeout=10.0), MonotonicClock())
        send = await client.prepare((1, 2), 5)
        for answer in answers:
            is_whole.clear()
            sending = asyncio.ensure_future(send(answer))
            while answer.finished is None:
                await asyncio.sleep(0)
            finished = answer.finished
            is_whole.set()
            await sending
            assert answer.finished == finished, "the answer is no slower for it"
        await client.close()
    assert [(answer.failure, answer.num_output_tokens) for answer in answers] == [(None, 5)] * 2
    assert len(ports) == num_connections
