"""Requests as bytes on a connection: bodies and heads that are too long or have no end, what is no HTTP, and wishes to
upgrade."""

import asyncio
import contextlib
import json
import socket

import pytest

from router.edge import http_exchange
from router.edge.http_protocol import MAX_HEAD_BYTES, MAX_UNANSWERED
from tests.router.edge.gateway_client import COMPLETION, Gateway
from tests.router.scripted_nodes import PATIENCE

pytestmark = pytest.mark.asyncio(loop_scope="module")  # one server for the whole file

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


async def test_a_client_that_sends_all_of_too_long_a_body_before_it_reads_gets_the_refusal(gateway: Gateway) -> None:
    """It would see a reset if the connection were closed before all of the body was taken."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    body = bytes(12 << 20)  # more than the system keeps for a server that does not read
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
    )
    writer.write(body)
    await writer.drain()
    assert (await reader.readline()).startswith(b"HTTP/1.1 413")
    writer.close()


async def test_a_client_that_asks_before_it_sends_too_long_a_body_is_refused_without_it(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_exchange, "DRAIN_SECONDS", 2 * PATIENCE)
    for length, answer in ((1 << 20, b"100 Continue"), ((1 << 20) + 1, b"413")):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(HEAD + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % length)
        assert (await asyncio.wait_for(reader.readline(), PATIENCE)).startswith(b"HTTP/1.1 " + answer)
        writer.close()


@pytest.mark.parametrize(
    ("path", "content_type", "length", "status"),
    [
        ("/v1/completions", "application/json", (1 << 20) + 1, 413),
        ("/v1/completions", "text/plain", 9, 415),
        ("/nowhere", "application/json", 9, 404),
    ],
)
async def test_a_refusal_before_the_body_was_asked_for_ends_the_connection(
    gateway: Gateway, path: str, content_type: str, length: int, status: int
) -> None:
    """What the client sends next would be taken for the body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    head = f"POST {path} HTTP/1.1\r\nexpect: 100-continue\r\ncontent-type: {content_type}\r\ncontent-length: {length}"
    writer.write(head.encode() + b"\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), PATIENCE)
    assert answer.startswith(b"HTTP/1.1 %d" % status) and b"\r\nconnection: close\r\n" in answer
    writer.close()


async def test_a_client_that_was_asked_for_its_body_keeps_the_connection(gateway: Gateway) -> None:
    body = json.dumps(COMPLETION).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    for _ in range(2):
        writer.write(HEAD + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(body))
        await asyncio.wait_for(reader.readuntil(b"100 Continue\r\n\r\n"), PATIENCE)
        writer.write(body)
        assert (await asyncio.wait_for(reader.readuntil(b"}}"), PATIENCE)).startswith(b"HTTP/1.1 200")
    writer.close()


async def test_too_long_a_body_that_does_not_go_on_is_refused(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_exchange, "DRAIN_SECONDS", 0.1)
    for start in (b"content-length: %d\r\n\r\n" % (4 << 20), b"transfer-encoding: chunked\r\n\r\n200000\r\n"):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(HEAD + start + bytes(2 << 20))
        assert (await asyncio.wait_for(reader.readline(), 20)).startswith(b"HTTP/1.1 413")
        writer.close()


async def test_an_endless_body_is_cut_off_while_reading(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_exchange, "DRAIN_SECONDS", 2 * PATIENCE)  # by its length, before the time is over
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\n\r\n"
    )
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"

    async def send_for_ever() -> None:
        while True:
            writer.write(chunk)
            await writer.drain()

    sending = asyncio.create_task(send_for_ever())
    async with asyncio.timeout(PATIENCE):
        assert (await reader.readline()).startswith(b"HTTP/1.1 413")
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    writer.close()
    assert (await gateway.post("/v1/completions", COMPLETION)).status_code == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x00\xa5\x01\x00\x00",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 10000000000000000000000\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nno size\r\n{}",
        b"GET /" + b"x" * (MAX_HEAD_BYTES + 1),
    ],
    ids=["TLS", "length", "chunk", "path"],
)
async def test_what_is_no_http_is_refused_in_openai_s_form(gateway: Gateway, sent: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(sent)
    head, _, body = (await asyncio.wait_for(reader.read(), 20)).rpartition(b"\r\n\r\n")
    writer.close()
    assert b"HTTP/1.1 400" in head
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert (await gateway.post("/v1/completions", COMPLETION)).status_code == 200


@pytest.mark.parametrize("more", [b"\x00", b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n\x00"])
async def test_junk_behind_a_request_does_not_get_into_its_answer(gateway: Gateway, more: bytes) -> None:
    gateway.relay.hang_at = 2
    body = json.dumps(COMPLETION | {"stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(HEAD + b"content-length: %d\r\n\r\n%s" % (len(body), body))
    await reader.readuntil(b"data: ")
    writer.write(more)
    assert b"HTTP" not in await asyncio.wait_for(reader.read(), 20)
    writer.close()
    await asyncio.wait_for(gateway.relay.closed.wait(), 20)


@pytest.mark.parametrize(
    ("start", "more", "answer"),
    [
        (HEAD + b"x-long: ", b"x" * 4096, b"HTTP/1.1 400"),
        (HEAD, b"x-many: 1\r\n" * 300, b"HTTP/1.1 400"),
        (b"GET /", b"x" * 4096, b"HTTP/1.1 400"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n", b"x-trailer: 1\r\n" * 300, b""),
    ],
    ids=["a header", "headers", "a path", "trailers"],
)
async def test_endless_headers_paths_and_trailers_are_cut_off(
    gateway: Gateway, start: bytes, more: bytes, answer: bytes
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(start)

    async def send_for_ever() -> None:
        while True:
            writer.write(more)
            await writer.drain()

    with contextlib.suppress(ConnectionError):
        await asyncio.wait_for(send_for_ever(), 20)
    with contextlib.suppress(ConnectionError):  # what was sent behind the answer may have taken it along
        assert (await asyncio.wait_for(reader.read(), 20)).startswith(answer)
    writer.close()
    assert (await gateway.post("/v1/completions", COMPLETION)).status_code == 200


@pytest.mark.parametrize("piece", [1, 1 << 20])
@pytest.mark.parametrize("connection", [b"Upgrade, HTTP2-Settings", b"close, Upgrade"])
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_wish_to_upgrade_is_ignored_and_the_body_read(
    gateway: Gateway, piece: int, connection: bytes, chunked: bool
) -> None:
    body = json.dumps(COMPLETION).encode()
    length = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % len(body)
    request = HEAD + b"connection: %s\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n%s\r\n\r\n" % (connection, length)
    request += b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if chunked else body
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for start in range(0, len(request), piece):
        writer.write(request[start : start + piece])
        await writer.drain()
    assert (await asyncio.wait_for(reader.readuntil(b"}]"), 20)).startswith(b"HTTP/1.1 200")
    if not connection.startswith(b"close"):
        await reader.readuntil(b"}}")
        writer.write(b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close, upgrade\r\nupgrade: websocket\r\n\r\n")
        assert b"HTTP/1.1 200" in await asyncio.wait_for(reader.read(), 20)
    writer.close()


async def test_a_wish_for_a_tunnel_is_refused(gateway: Gateway) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(b"CONNECT elsewhere.example:443 HTTP/1.1\r\nhost: elsewhere.example:443\r\n\r\n")
    assert (await asyncio.wait_for(reader.readline(), 20)).startswith(b"HTTP/1.1 4")
    writer.close()


async def test_many_wishes_to_upgrade_may_come_at_once(gateway: Gateway) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(
        b"GET /livez HTTP/1.1\r\nconnection: upgrade\r\nupgrade: x\r\nx-more: %s\r\n\r\n" % (b"x" * 100) * 1000
    )
    for _ in range(1000):
        assert (await asyncio.wait_for(reader.readuntil(b'{"status":"ok"}'), 20)).startswith(b"HTTP/1.1 200")
    writer.close()


async def test_more_requests_than_may_wait_are_refused_though_they_come_at_once(gateway: Gateway) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    request = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"
    for _ in range(2):  # those that are answered do not count
        writer.write(request * MAX_UNANSWERED)
        for _ in range(MAX_UNANSWERED):
            assert (await asyncio.wait_for(reader.readuntil(b'{"status":"ok"}'), 20)).startswith(b"HTTP/1.1 200")
    writer.write(request * 2 * MAX_UNANSWERED)
    answer = await asyncio.wait_for(reader.read(), 20)
    assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"HTTP/1.1") == 1
    assert f"At most {MAX_UNANSWERED} requests".encode() in answer
    writer.close()


async def test_a_connection_may_bring_more_heads_than_one_request_may_have(gateway: Gateway) -> None:
    """The last one is endless, and is refused as the first one of a connection would be, whatever came before it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    body = json.dumps(COMPLETION | {"user": "x" * 100_000}).encode()
    writer.write(HEAD + b"content-length: %d\r\n\r\n%s" % (len(body), body))
    assert (await asyncio.wait_for(reader.readuntil(b'"kvrelay":{'), 20)).startswith(b"HTTP/1.1 200")
    await reader.readuntil(b"}}")
    for _ in range(3):
        writer.write(b"GET /livez HTTP/1.1\r\nhost: x\r\nx-long: %s\r\n\r\n" % (b"x" * 40_000))
        assert (await asyncio.wait_for(reader.readuntil(b'{"status":"ok"}'), 20)).startswith(b"HTTP/1.1 200")
    writer.write(b"GET /livez HTTP/1.1\r\nhost: x\r\nx-long: %s" % (b"x" * MAX_HEAD_BYTES))
    assert (await asyncio.wait_for(reader.readline(), 20)).startswith(b"HTTP/1.1 400")
    writer.close()


async def test_a_body_may_come_in_small_chunks(gateway: Gateway) -> None:
    """All their sizes together are more than a head may have."""
    body = json.dumps(COMPLETION | {"user": "x" * 900_000}).encode()
    chunks = b"".join(b"10\r\n%s\r\n" % body[i : i + 16].ljust(16) for i in range(0, len(body), 16))
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
    assert (await asyncio.wait_for(reader.readline(), 20)).startswith(b"HTTP/1.1 200")
    writer.close()
