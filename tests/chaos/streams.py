"""One client's stream in either protocol: all that it received, and how long it had to wait.

Nothing here retries: an `Answer` holds what a client would see.
"""

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, cast

import grpc
import httpx

from kvrelay.core.tasks import end_tasks
from kvrelay.v1 import common_pb2, router_pb2, router_pb2_grpc
from tests.e2e.client import grpc_request

DEADLINE_SECONDS = 120.0  # of a request, many times what it needs
_REFUSAL = "no decode node can serve now"


class Protocol(Enum):
    GRPC = "gRPC"
    HTTP = "HTTP"


@dataclass(frozen=True, slots=True)
class Ask:
    """A request. `sampling` holds options that have the same name in both protocols; `name` is for reports."""

    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Mapping[str, Any]
    protocol: Protocol


@dataclass(frozen=True, slots=True)
class Leave:
    """The moment when a client leaves: `delay` seconds after its chunk number `num_chunks` (0: after its request)."""

    num_chunks: int
    delay: float


@dataclass(slots=True)
class Answer:
    """All that a client received. `outputs` holds token ids over gRPC and text over HTTP, by index. `gap` is the
    longest wait between two chunks, `first` the wait for the first one, in seconds."""

    outputs: dict[int, list[int] | str] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    error: str = ""
    num_chunks: int = 0
    complete: bool = False
    first: float = 0.0
    gap: float = 0.0
    left: bool = False

    @property
    def refused(self) -> bool:
        """Tells whether the router refused the request because no decode node lived, before any output."""
        return _REFUSAL in self.error and not self.outputs

    def add(self, index: int, piece: list[int] | str, finish_reason: str) -> None:
        if index in self.finish_reasons:
            self.error = self.error or f"output {index} goes on after its end"
        if isinstance(piece, str):
            self.outputs[index] = cast("str", self.outputs.get(index, "")) + piece
        else:
            cast("list[int]", self.outputs.setdefault(index, [])).extend(piece)
        if finish_reason:
            self.finish_reasons[index] = finish_reason


class _Reader:
    """A reader of one stream, which fills in its answer."""

    def __init__(self, leave: Leave | None) -> None:
        self.answer = Answer()
        self.may_leave = asyncio.Event()
        self._num_chunks = None if leave is None else leave.num_chunks
        self._last = time.monotonic()
        if self._num_chunks == 0:
            self.may_leave.set()

    def tick(self) -> None:
        """Notes that a chunk has come."""
        now = time.monotonic()
        waited, self._last = now - self._last, now
        if self.answer.num_chunks == 0:
            self.answer.first = waited
        else:
            self.answer.gap = max(self.answer.gap, waited)
        self.answer.num_chunks += 1
        if self.answer.num_chunks == self._num_chunks:
            self.may_leave.set()

    def take_grpc(self, message: router_pb2.GenerateResponse) -> None:
        for output in message.outputs:
            reason = common_pb2.FinishReason.Name(output.finish_reason) if output.finish_reason else ""
            self.answer.add(output.index, list(output.token_ids), reason)
            if output.logprobs:
                entries = self.answer.logprobs.setdefault(output.index, [])
                entries.extend(entry.logprob for entry in output.logprobs)
        self.answer.complete = message.HasField("usage")

    def take_http(self, data: str) -> None:
        if data == "[DONE]":
            self.answer.complete = True
            return
        event = json.loads(data)
        if "error" in event:
            self.answer.error = str(event["error"])
            return
        for choice in event["choices"]:
            self.answer.add(choice["index"], str(choice["text"]), choice["finish_reason"] or "")


class Client:
    """A client of one router, for many streams at a time."""

    def __init__(self, channel: grpc.aio.Channel, http: httpx.AsyncClient) -> None:
        self._stub = cast("router_pb2_grpc.RouterAsyncStub", router_pb2_grpc.RouterStub(channel))
        self._http = http

    async def ask(self, ask: Ask, *, salt: str = "", leave: Leave | None = None) -> Answer:
        """Returns the answer when the stream has ended in any way, or when the client has left."""
        reader = _Reader(leave)
        read = self._read_grpc if ask.protocol is Protocol.GRPC else self._read_http
        stream = asyncio.create_task(read(ask, salt, reader))
        leaving = asyncio.create_task(_leave(reader, leave)) if leave is not None else None
        try:
            await asyncio.wait({stream, leaving} if leaving else {stream}, return_when=asyncio.FIRST_COMPLETED)
            reader.answer.left = not stream.done()
        finally:
            await end_tasks(stream, leaving)
        if not reader.answer.left:
            if not stream.cancelled() and (failure := stream.exception()) is not None:
                raise failure
            reader.tick()  # the wait for the end counts too
            if not reader.answer.complete and not reader.answer.error:
                reader.answer.error = "the stream ended early without an error"
        return reader.answer

    async def _read_grpc(self, ask: Ask, salt: str, reader: _Reader) -> None:
        request = grpc_request(ask.prompt, ask.max_tokens, cache_salt=salt, **ask.sampling)
        call = self._stub.GenerateStream(request, timeout=DEADLINE_SECONDS)
        try:
            async for message in call:
                reader.tick()
                reader.take_grpc(message)
        except grpc.aio.AioRpcError as error:
            reader.answer.error = f"{error.code().name}: {error.details()}"
        finally:
            call.cancel()

    async def _read_http(self, ask: Ask, salt: str, reader: _Reader) -> None:
        body = {"prompt": list(ask.prompt), "max_tokens": ask.max_tokens, "stream": True, "ignore_eos": True}
        body |= {"temperature": 0.0, "cache_salt": salt or None, **ask.sampling}
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    reader.answer.error = f"{response.status_code}: {(await response.aread()).decode()}"
                    return
                async for line in response.aiter_lines():
                    if line.startswith("data: "):
                        reader.tick()
                        reader.take_http(line.removeprefix("data: "))
        except httpx.HTTPError as error:
            reader.answer.error = f"{type(error).__name__}: {error}"


async def _leave(reader: _Reader, leave: Leave) -> None:
    await reader.may_leave.wait()
    await asyncio.sleep(leave.delay)
