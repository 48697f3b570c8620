"""uvicorn's HTTP parser, with a limit on what is not part of a body and on requests that wait for an earlier one, with
a way to drop a connection, with answers that clients of HTTP/1.0 understand, and without upgrades to other protocols or
patience with clients that never finish the head of a request or never take an answer.

httptools limits neither request lines and header lines nor chunk sizes and trailers. Invariant: of one request, at most
`MAX_HEAD_BYTES` of them are kept, plus what came in the same read and as many bytes as its body has. When a client
leaves, every request on its connection learns of it, as soon as fewer than `MAX_WAITING` wait there, and none of these
with a body that is not small.
"""

import asyncio
import json
import math
from collections import deque
from collections.abc import Sized
from contextlib import suppress
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from router.edge.openai_errors import refusal_body
from router.edge.presence import PRESENCE, Presence

MAX_HEAD_BYTES = 64 << 10
# A client may send requests before the first one is answered. As long as fewer than this wait, more is read.
MAX_WAITING = 16
# One read may bring many thousands of requests, all of which the event loop would set up in one turn.
MAX_UNANSWERED = 1024
# Where an application finds, in a request's `state`, the function that drops the connection with all that it buffers.
ABORT = "kvrelay.abort"


class _Parser(httptools.HttpRequestParser):
    """A parser that ignores a wish to upgrade, as RFC 9110 (7.8) allows: a request with one is parsed again without it.
    httptools would take its body for the other protocol's data."""

    def __init__(self, connection: "BoundedHttp") -> None:
        super().__init__(connection)
        self._connection = connection
        with suppress(AttributeError):  # before httptools 0.6.3
            self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does

    @property
    def wishes_upgrade(self) -> bool:
        return self.should_upgrade() and self.get_method() != b"CONNECT"

    def feed_data(self, data: Any) -> None:
        parser = self
        while True:  # not by recursion: one read may bring hundreds of such requests
            try:
                super(_Parser, parser).feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not parser.wishes_upgrade:
                    raise
                data = parser._head_without_wish() + data[upgrade.args[0] :]
            parser = self._connection.parser = _Parser(self._connection)  # the old one expects nothing after "close"

    def _head_without_wish(self) -> bytes:
        request_line = b"%s %s HTTP/%s" % (self.get_method(), self._connection.url, self.get_http_version().encode())
        fields = [b"%s: %s" % field for field in self._connection.headers if field[0] != b"upgrade"]
        return b"\r\n".join((request_line, *fields, b"", b""))


class _FlowControl(FlowControl):
    """uvicorn's flow control, which reads nothing more of a connection on which too many requests wait, not even that
    its client has left."""

    def __init__(self, transport: asyncio.Transport, waiting: Sized) -> None:
        super().__init__(transport)
        self._waiting = waiting

    def resume_reading(self) -> None:
        if len(self._waiting) < MAX_WAITING:
            super().resume_reading()


class _WithoutChunks(RequestResponseCycle):
    """An answer to a client of HTTP/1.0, which must not be sent chunks (RFC 9112, 6.1): a body without a length ends
    with the connection. A cycle that uvicorn has made becomes one."""

    @classmethod
    def make(cls, cycle: RequestResponseCycle) -> None:
        # Not a function in the place of `send`, which would keep the cycle until a collection of garbage.
        cycle.__class__ = cls
        cycle.chunked_encoding = False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            # uvicorn sends only what it expects, and expects what it was to send when it was cancelled.
            self.expected_content_length = len(message["body"])
        await super().send(message)


class _AskedFirst(RequestResponseCycle):
    """An answer to a client that asks whether to send its body (RFC 9110, 10.1.1). If the answer comes at once instead,
    the connection ends with it: the client's next request would be taken for that body."""

    async def send(self, message: Any) -> None:
        if self.waiting_for_100_continue:
            self.keep_alive = False
        await super().send(message)


class BoundedHttp(HttpToolsProtocol):
    """An HTTP connection within these limits. A request that exceeds them is answered with 400, and the connection
    closed."""

    parser: _Parser

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = _Parser(self)
        self._unanswered: deque[RequestResponseCycle] = deque()  # the first one is being answered, the others wait
        self._write_timer: asyncio.TimerHandle | None = None
        self._num_head_bytes = 0  # of the request that is being read, like those of its body
        self._num_body_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        self.flow = _FlowControl(transport, self.pipeline)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        for cycle in self._unanswered:  # uvicorn tells only the last one
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.scope["state"][PRESENCE].leave()
            cycle.message_event.set()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn leaves it if the client has reset the connection
        if self._write_timer is not None:
            self._write_timer.cancel()

    def on_message_begin(self) -> None:
        while self._unanswered and self._unanswered[0].response_complete:
            self._unanswered.popleft()
        if len(self._unanswered) >= MAX_UNANSWERED:
            message = f"At most {MAX_UNANSWERED} requests may be sent before the first one is answered."
            self.send_400_response(message)
            raise httptools.HttpParserError(message)  # so that nothing more of this read is parsed
        super().on_message_begin()
        self.scope["state"] |= {ABORT: self.transport.abort, PRESENCE: Presence()}

    def data_received(self, data: bytes) -> None:
        self._num_head_bytes += len(data)
        cycle, timer = self.cycle, self.timeout_keep_alive_task
        self.timeout_keep_alive_task = None  # from uvicorn, which would cancel it for any part of a request
        super().data_received(data)
        if self.cycle is cycle:
            self.timeout_keep_alive_task = timer
        elif timer is not None:
            timer.cancel()
        if self._num_head_bytes <= MAX_HEAD_BYTES + self._num_body_bytes or self.transport.is_closing():
            return
        self.send_400_response(f"Request line and headers may have {MAX_HEAD_BYTES} bytes.")

    def on_headers_complete(self) -> None:
        if self.parser.wishes_upgrade:
            return
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            _WithoutChunks.make(self.cycle)
        elif self.expect_100_continue:
            self.cycle.__class__ = _AskedFirst
        self._unanswered.append(self.cycle)
        self.flow.resume_reading()  # uvicorn stops if this one has to wait, and would not see the client leave

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._write_timer is None:
            self._drop_unless_taken(math.inf)

    def _drop_unless_taken(self, num_left_before: float) -> None:
        """Drops the connection if none of what it still has to send was taken since the last call, and otherwise calls
        itself again. To close it would be to wait for ever."""
        self._write_timer = None
        num_left = self.transport.get_write_buffer_size()
        if num_left == num_left_before:
            self.transport.abort()
        elif num_left:
            self._write_timer = self.loop.call_later(self.timeout_keep_alive, self._drop_unless_taken, num_left)

    def send_400_response(self, msg: str) -> None:
        """Answers what is no request, in OpenAI's form, and closes. Only closes if another answer has begun, and does
        nothing if it was called before, as by a callback of the parser that then fails."""
        if self.transport.is_closing():
            return
        if not any(cycle.response_started and not cycle.response_complete for cycle in self._unanswered):
            body = json.dumps(refusal_body(msg)).encode()
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close" % len(body)
            self.transport.write(b"HTTP/1.1 400 Bad Request\r\n%s\r\n\r\n%s" % (head, body))
        self.transport.close()

    def on_body(self, body: bytes) -> None:
        self._num_head_bytes -= len(body)
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.wishes_upgrade:
            return
        self._num_head_bytes = self._num_body_bytes = 0
        super().on_message_complete()
        if not self.pipeline:  # uvicorn reads nothing after a large body until somebody waits for more
            self.flow.resume_reading()
