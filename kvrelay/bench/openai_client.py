"""The client of any OpenAI-compatible server: `/v1/completions` and `/v1/chat/completions`, streamed over HTTP.

It uses aiohttp, whose parser is C, because the load generator shares the machine's cores with what it measures.
"""

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import aiohttp

from kvrelay.bench.base import Answer, Failure, Generation, Prompt, Send, messages_of
from kvrelay.bench.json_body import chat_body, completion_body
from kvrelay.bench.model_choice import choose_model
from kvrelay.bench.sse import SseParser
from kvrelay.core.clock import Clock
from kvrelay.core.errors import UnavailableError

# Less than servers keep idle connections (uvicorn: 5 s), so that no request goes out on one that is just being closed.
_KEEPALIVE_SECONDS = 2.0
_CHECK_TIMEOUT_SECONDS = 10.0
_END_SECONDS = 1.0  # that a server may take to end a response after all of its events
_MAX_ERROR_CHARS = 500
_MAX_ERROR_BYTES = 64 << 10


class OpenAIClient:
    """A client of the server at `url`, which may end in `/v1`. `extra_body`: what requests have beside OWN_FIELDS."""

    def __init__(
        self,
        url: str,
        endpoint: Literal["completions", "chat"],
        generation: Generation,
        clock: Clock,
        *,
        api_key: str = "",
        keep_alive: bool = True,
        extra_body: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._base = url.rstrip("/").removesuffix("/v1")
        self._path = "/v1/completions" if endpoint == "completions" else "/v1/chat/completions"
        self._is_chat = endpoint == "chat"
        self._clock = clock
        self._fields: dict[str, Any] = {
            **extra_body,
            "temperature": generation.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if generation.ignore_eos:
            self._fields["ignore_eos"] = True
        if generation.top_k > 0:
            self._fields["top_k"] = generation.top_k
        if generation.top_p < 1.0:
            self._fields["top_p"] = generation.top_p
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, force_close=not keep_alive, keepalive_timeout=_KEEPALIVE_SECONDS if keep_alive else None
            ),
            timeout=aiohttp.ClientTimeout(total=generation.timeout),
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),  # a load balancer's would keep all requests on one server
        )

    async def resolve_model(self, wanted: str) -> str:
        try:
            async with self._session.get(
                self._base + "/v1/models", timeout=aiohttp.ClientTimeout(total=_CHECK_TIMEOUT_SECONDS)
            ) as response:
                status = response.status
                body = await (response.read() if status == 200 else _beginning(response.content))
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise UnavailableError(_unanswered(self._base, error)) from error
        if status in (401, 403):
            raise UnavailableError(f"{self._base} refuses us ({_error_text(body)}); give the key in KVRELAY_API_KEY")
        if status >= 500 and not wanted:
            raise UnavailableError(
                f"{self._base}/v1/models answers http {status} ({_error_text(body)}); wait until the server is ready, "
                "or name the model with --model"
            )
        served = _model_names(body) if status == 200 else []
        self._fields["model"] = choose_model(wanted, served, where=f"{self._base}/v1/models")
        return str(self._fields["model"])

    async def prepare(self, prompt: Prompt, max_tokens: int) -> Send:
        fields = self._fields | {"max_tokens": max_tokens}
        pieces: list[bytes] = []
        for piece in chat_body(fields, messages_of(prompt)) if self._is_chat else completion_body(fields, prompt):
            pieces.append(piece)
            await asyncio.sleep(0)
        return partial(self._send, b"".join(pieces))

    async def _send(self, body: bytes, answer: Answer) -> None:
        answer.sent = self._clock.now()
        try:
            async with self._session.post(self._base + self._path, data=body) as response:
                if response.status != 200:
                    message = _error_text(await _beginning(response.content))
                    answer.failure = Failure(f"http {response.status}", message)
                else:
                    await self._read(response.content, answer)
                    answer.finished = self._clock.now()
                    if answer.failure is None:
                        await _read_to_end(response.content)
        except TimeoutError:
            answer.failure = Failure("timeout", "not finished within --timeout")
        except aiohttp.ClientConnectorError as error:
            answer.failure = Failure("connect", str(error))
        except (ValueError, TypeError, AttributeError, RecursionError) as error:  # not the JSON that the API describes
            answer.failure = Failure("not understood", str(error))
        except aiohttp.ClientError as error:
            answer.failure = Failure("disconnected", f"{type(error).__name__}: {error}")
        if answer.finished is None:
            answer.finished = self._clock.now()

    async def close(self) -> None:
        await self._session.close()
        await asyncio.sleep(0)  # aiohttp's transports close in the next turn of the loop

    async def _read(self, content: aiohttp.StreamReader, answer: Answer) -> None:
        parser = SseParser()
        texts: list[str] = []
        token_ids: list[int] = []
        closed: float | None = None  # when the finish_reason came
        is_done = False
        async for data in content.iter_any():
            now = self._clock.now()
            for payload in parser.feed(data):
                if is_done := payload == b"[DONE]":
                    break
                event = json.loads(payload)
                if event.get("error") is not None:
                    answer.failure = Failure("error in the stream", _error_text(payload))
                    return
                if usage := event.get("usage"):
                    _count(usage, answer)
                for choice in event.get("choices") or ():
                    if choice.get("finish_reason") is not None:
                        closed = now
                    text = self._text(choice, is_first=not answer.arrivals)
                    if text is not None:
                        answer.arrivals.append(now)
                        texts.append(text)
                        token_ids += choice.get("token_ids") or ()
            if is_done or parser.error is not None:
                break
        answer.text, answer.token_ids = "".join(texts), tuple(token_ids)
        if closed is not None and not answer.arrivals and answer.num_output_tokens:
            answer.arrivals.append(closed)  # a single token without text comes with the finish_reason
        if parser.error is not None:
            answer.failure = Failure("error in the stream", _error_text(parser.error))
        elif closed is None and not is_done:
            rest = f": {_error_text(parser.rest)}" if parser.rest else ""  # such as JSON in place of events
            answer.failure = Failure("ended early", f"the stream ended without a finish_reason{rest}")

    def _text(self, choice: dict[str, Any], *, is_first: bool) -> str | None:
        """Returns the text that this event adds, or None if it only opens or closes the choice. A token may not have
        text yet. Some servers name the role in every event; `is_first` tells that none has added anything yet."""
        if not self._is_chat:
            text: str = choice.get("text") or ""
            return text if text or choice.get("finish_reason") is None else None
        delta = choice.get("delta") or {}
        text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
        if text:
            return text
        return None if (is_first and "role" in delta) or choice.get("finish_reason") is not None else ""


def _unanswered(base: str, error: Exception) -> str:
    """Returns what kept a server from answering: nobody listens or answers in time, or another kind of server does."""
    said = "it took too long" if isinstance(error, TimeoutError) else str(error)
    unreached = (aiohttp.ClientConnectorError, TimeoutError, ValueError)
    if isinstance(error, unreached) and not isinstance(error, aiohttp.ClientSSLError):
        return f"nothing answers at {base} ({said}); start the server, or give its address with --url"
    return (
        f"what answers at {base} is not understood ({said}); --url begins with http:// or https://, as the "
        "server has it, or with grpc:// for the gRPC port of a kvrelay router"
    )


def _count(usage: dict[str, Any], answer: Answer) -> None:
    answer.num_output_tokens = _number(usage, "completion_tokens")
    answer.num_prompt_tokens = _number(usage, "prompt_tokens")
    answer.num_cached_tokens = _number(usage.get("prompt_tokens_details") or {}, "cached_tokens")


def _number(counts: dict[str, Any], name: str) -> int | None:
    """Returns one of the server's counts, None if it sends none. Raises TypeError if it is no whole number."""
    count = counts.get(name)
    if count is None or (isinstance(count, int) and not isinstance(count, bool) and count >= 0):
        return count
    raise TypeError(f"usage: {name} is {count!r}")


def _model_names(body: bytes) -> list[str]:
    try:
        return [str(model["id"]) for model in json.loads(body)["data"]]
    except (ValueError, KeyError, TypeError):
        return []


async def _read_to_end(content: aiohttp.StreamReader) -> None:
    """Reads what ends a response after its last event, so that its connection can be used again. Gives up on a server
    that holds or breaks it."""
    with suppress(TimeoutError, aiohttp.ClientError):
        async with asyncio.timeout(_END_SECONDS):
            async for _ in content.iter_any():
                pass


async def _beginning(content: aiohttp.StreamReader) -> bytes:
    """Returns an error's body, or the beginning of one that is longer than any message needs to be."""
    body = b""
    async for data in content.iter_any():
        body += data
        if len(body) > _MAX_ERROR_BYTES:
            break
    return body


def _error_text(body: bytes) -> str:
    """Returns the message inside an OpenAI error body, or the body itself if it is none."""
    text = body.decode(errors="replace")
    try:
        error = json.loads(text)["error"]
        text = str(error["message"]) if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        pass
    return text[:_MAX_ERROR_CHARS]
