"""What the HTTP gateway refuses: wrong fields, bodies that are no requests, and requests without an end."""

import asyncio
import contextlib
import gzip
import json
import socket

import openai
import pytest

from kvrelay.core.errors import DeadlineError, GivenUpError, KVRelayError, OverloadedError
from router.edge import http_exchange
from router.edge.http_protocol import MAX_HEAD_BYTES
from router.edge.openai_schema import MAX_PROMPTS
from router.edge.validation import MAX_CHAT_TEMPLATE_KWARGS_CHARS
from tests.router.edge.edge_parts import MAX_MODEL_LEN, MODEL
from tests.router.edge.gateway_client import CHAT, COMPLETION, Gateway
from tests.router.scripted_nodes import PATIENCE

pytestmark = pytest.mark.asyncio(loop_scope="module")  # one server for the whole file


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": [1, "two"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": {"text": "x"}}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [-1], "echo": True}, "prompt"),
        ({"prompt": [[5], [2**40]], "echo": True}, "prompt"),
        ({"prompt": [5] * MAX_MODEL_LEN}, "prompt"),
        ({"prompt": ["x"] * 1000}, "prompt"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"temperature": "0.7"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a"] * 100}, "stop"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"n": 10**400}, "n"),
        ({"logprobs": 1000}, "logprobs"),
        ({"logprobs": 10**400}, "logprobs"),
        ({"prompt_logprobs": 10**400}, "prompt_logprobs"),
        ({"prompt": [[5] * 250] * 4, "n": 64, "prompt_logprobs": 20, "max_tokens": 1}, "prompt_logprobs"),
        ({"repetition_penalty": 10**400}, "repetition_penalty"),
        *(({"logit_bias": {key: 1}}, "logit_bias") for key in ("the", "", "5_0", " 5", "\u0665", "9" * 5000)),
        ({"logit_bias": {"5": 1, "05": 1}}, "logit_bias"),
        ({"seed": 2**65}, "seed"),
        ({"suffix": "end"}, "suffix"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"best_of": 3}, "best_of"),
        ({"messages": [{"role": "user", "content": "Hi"}]}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"chat_template_kwargs": {"style": "terse"}}, "chat_template_kwargs"),
        ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"bad_words": ["capital"]}, "bad_words"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"max_completion_tokens": 3}, "max_completion_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_json": {}}, "guided_json"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"stream": "yes"}, "stream"),
    ],
)
async def test_a_bad_completion_request_names_its_field(
    gateway: Gateway, change: dict[str, object], param: str
) -> None:
    await expect_refusal(gateway, "/v1/completions", COMPLETION | change, param)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 128 * MAX_MODEL_LEN}]}, "messages"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": [{"role": "assistant", "content": "I begin"}]}, "messages"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"functions": [{}]}, "functions"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"max_completion_tokens": 10**6}, "max_completion_tokens"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"echo": True}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"prompt": "Hi"}, "prompt"),
        ({"add_special_tokens": True}, "add_special_tokens"),
        ({"chat_template_kwargs": ["style"]}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"style": "x" * MAX_CHAT_TEMPLATE_KWARGS_CHARS}}, "chat_template_kwargs"),
        ({"allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"bad_words": ["capital"]}, "bad_words"),
    ],
)
async def test_a_bad_chat_request_names_its_field(gateway: Gateway, change: dict[str, object], param: str) -> None:
    await expect_refusal(gateway, "/v1/chat/completions", CHAT | change, param)


async def expect_refusal(gateway: Gateway, path: str, body: dict[str, object], param: str) -> None:
    response = await gateway.post(path, body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert param in error["message"]
    assert "\n" not in error["message"]
    assert (await gateway.post("/v1/completions", COMPLETION)).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/completions", COMPLETION | {"prompt": [5] * MAX_MODEL_LEN}, f"has {MAX_MODEL_LEN} tokens"),
        ("/v1/completions", COMPLETION | {"prompt": [[5], [5] * MAX_MODEL_LEN]}, f"has {MAX_MODEL_LEN} tokens"),
        ("/v1/completions", COMPLETION | {"prompt": [5] * 250, "max_tokens": 7}, "max_tokens may be at most 6"),
        ("/v1/completions", COMPLETION | {"prompt": "x" * 129 * MAX_MODEL_LEN}, f"{129 * MAX_MODEL_LEN} characters"),
        ("/v1/chat/completions", CHAT | {"max_completion_tokens": 10**6}, "max_completion_tokens may be at most"),
    ],
)
async def test_clients_recognise_that_they_have_to_shorten_a_conversation(
    gateway: Gateway, path: str, body: dict[str, object], words: str
) -> None:
    """Some look for the code, others, such as LiteLLM, for OpenAI's words."""
    error = (await gateway.post(path, body)).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith(f"This model's maximum context length is {MAX_MODEL_LEN} tokens, but ")
    assert words in error["message"]


async def test_harmless_values_of_unsupported_fields_are_accepted(gateway: Gateway) -> None:
    body = {**CHAT, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "functions": None}
    more = {"bad_words": [], "best_of": 1, "logprobs": False, "top_logprobs": 0}
    assert (await gateway.post("/v1/chat/completions", {**body, **more})).status_code == 200


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "application/vnd.api+json"])
async def test_every_name_of_json_is_understood(gateway: Gateway, content_type: str) -> None:
    body, headers = json.dumps(COMPLETION), {"content-type": content_type}
    assert (await gateway.http.post("/v1/completions", content=body, headers=headers)).status_code == 200


async def test_as_many_prompts_and_bytes_as_are_allowed_are_answered(gateway: Gateway) -> None:
    body = json.dumps(COMPLETION | {"prompt": ["x"] * MAX_PROMPTS, "max_tokens": 1}).encode()
    headers = {"content-type": "application/json"}
    for missing, status in ((0, 200), (-1, 413)):
        data = body.ljust((1 << 20) - missing)
        assert (await gateway.http.post("/v1/completions", content=data, headers=headers)).status_code == status


@pytest.mark.parametrize(
    ("data", "headers", "status", "words"),
    [
        (b'{"model": ', {}, 400, "valid JSON"),
        (b"", {}, 400, "valid JSON"),
        (b'{"prompt": "\xff\xfe"}', {}, 400, "valid JSON"),
        (b'{"prompt": "\\ud800"}', {}, 400, "valid JSON"),
        (b"[" * 100_000, {}, 400, "valid JSON"),
        (b"[]", {}, 400, "JSON object"),
        (b"null", {}, 400, "JSON object"),
        (b"{}", {"content-type": "text/plain"}, 415, "application/json"),
        (gzip.compress(b"{}"), {"content-encoding": "gzip"}, 415, "without content-encoding gzip"),
        (b"\x00junk" * 400_000, {}, 413, "1048576"),
    ],
)
async def test_a_body_that_is_no_request_is_refused_with_the_reason(
    gateway: Gateway, data: bytes, headers: dict[str, str], status: int, words: str
) -> None:
    response = await gateway.http.post(
        "/v1/completions", content=data, headers={"content-type": "application/json"} | headers
    )
    assert response.status_code == status
    assert words in response.json()["error"]["message"]
    assert response.headers["x-request-id"]
    assert (await gateway.post("/v1/completions", COMPLETION)).status_code == 200


@pytest.mark.parametrize(
    ("error", "num_sent"),
    [(DeadlineError("too long"), 1), (GivenUpError("nodes ended"), 1), (OverloadedError("full"), 2)],
)
async def test_openai_s_client_does_not_send_again_what_would_fail_again(
    gateway: Gateway, error: KVRelayError, num_sent: int
) -> None:
    gateway.relay.fail_with = error
    with pytest.raises(openai.APIStatusError, match=str(error)):
        await gateway.openai.with_options(max_retries=1).completions.create(model=MODEL, prompt="x")
    assert len(gateway.relay.requests) == num_sent


async def test_of_an_unknown_path_little_is_repeated(gateway: Gateway) -> None:
    response = await gateway.http.get(f"/{'x' * 30_000}")
    assert response.status_code == 404
    assert len(response.json()["error"]["message"]) < 200


@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/completions/"), ("GET", "/livez/"), ("GET", "/metrics/")])
async def test_a_path_with_a_slash_too_many_is_unknown_and_leads_nowhere_else(
    gateway: Gateway, method: str, path: str
) -> None:
    response = await gateway.http.request(method, path, headers={"host": "elsewhere.example"}, json=COMPLETION)
    assert response.status_code == 404
    assert "location" not in response.headers
    assert path in response.json()["error"]["message"]


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


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


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
