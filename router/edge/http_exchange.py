"""One HTTP exchange, below the application: reading a bounded body, streaming events, sending a whole answer.

Invariant: a body beyond the limit is never held in memory, and one that does not arrive in time no longer. Nothing more
is read of a body for which there is no room beside the others, and no answer is held for a client that does not take
it. When the client disconnects, the work for it is cancelled, and it has ended before the exchange ends.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractContextManager, aclosing, closing, nullcontext

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvrelay.core.errors import CancelledByPeerError, KVRelayError, OverloadedError, UnavailableError
from kvrelay.core.rpc.write_deadline import WRITE_SECONDS, WriteDeadline
from router.edge.body_budget import BodyShare
from router.edge.http_protocol import ABORT
from router.edge.idle_comments import COMMENT_SECONDS, IdleComments
from router.edge.presence import Presence
from router.edge.untaken_answers import UntakenAnswers

_logger = logging.getLogger(__name__)

# How long a body may take to arrive, and how many of its bytes prolong that by a second.
BODY_SECONDS = 60.0
BODY_BYTES_PER_SECOND = 64 * 1024
# If a connection is closed while the client still sends, the client sees a reset instead of the answer. So at most this
# much of a body is read and thrown away first, for at most this long.
DRAIN_BYTES = 16 * 1024 * 1024
DRAIN_SECONDS = 5.0

_PART_BYTES = 64 << 10  # of an event or a whole answer, that a client has to take in time
_NO_CONTEXT = nullcontext()


async def read_json_body(request: Request, max_bytes: int, share: BodyShare, *, seconds: float = BODY_SECONDS) -> bytes:
    """Reads the body, which counts in `share` until that is given back. Raises HTTPException 415 if it is not plain
    JSON, 413 if it is larger than `max_bytes`, and 408 if it takes longer than `seconds` and what its bytes add to
    them; OverloadedError instead if it waits for room by then. Raises CancelledByPeerError if the client disconnects
    before its end, and UnavailableError if the server stops."""
    _check_content(request)
    try:
        return await _read_bounded(request, max_bytes, share, seconds)
    except ClientDisconnect:
        raise CancelledByPeerError("the client disconnected while sending") from None
    except asyncio.CancelledError:  # by the server that stops, which would log it as a failure and answer a plain 500
        raise UnavailableError("the router is stopping") from None
    except TimeoutError:
        if share.waited_in_vain:
            raise OverloadedError("other bodies take all the memory that they may; try again later") from None
        more = f"and another second for each {BODY_BYTES_PER_SECOND} bytes of it"
        message = f"the body did not arrive within {seconds:g} s, {more}: send it faster, or a smaller one"
        raise HTTPException(408, message, headers={"connection": "close"}) from None


def _check_content(request: Request) -> None:
    """Raises HTTPException 415 if the body is not plain JSON."""
    # A web page may send a body of no type to any address, without asking. Other clients may leave the type out.
    default = "of no type" if "origin" in request.headers else "application/json"
    content_type = request.headers.get("content-type", default).partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise HTTPException(415, f"the body must be application/json, not {content_type[:100]}")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise HTTPException(415, f"the body must not be compressed: send it without content-encoding {encoding[:100]}")


async def _read_bounded(request: Request, max_bytes: int, share: BodyShare, seconds: float) -> bytes:
    """Reads the body. Raises HTTPException 413 if it is too large, after the client was given time to send it all, and
    TimeoutError if it does not come in time."""
    due = asyncio.get_running_loop().time() + seconds
    chunks = aiter(request.stream())
    if int(request.headers.get("content-length", 0)) > max_bytes:
        if request.headers.get("expect", "").lower() != "100-continue":  # such a client waits with the body
            await _drain(chunks)
        raise _too_large(max_bytes)
    body = bytearray()
    async with asyncio.timeout_at(due) as deadline:
        async for chunk in chunks:
            if len(body) + len(chunk) > max_bytes:
                body.clear()
                share.give_back()
                deadline.reschedule(None)  # draining has a limit of its own
                await _drain(chunks)
                raise _too_large(max_bytes)
            body += chunk
            deadline.reschedule(due + len(body) / BODY_BYTES_PER_SECOND)
            await share.hold(len(body))
    await share.whole()
    return bytes(body)


def _too_large(max_bytes: int) -> HTTPException:
    return HTTPException(413, f"the body is larger than the limit of {max_bytes} bytes")


async def _drain(chunks: AsyncIterator[bytes]) -> None:
    drained = 0
    try:
        async with asyncio.timeout(DRAIN_SECONDS):
            async for chunk in chunks:
                drained += len(chunk)
                if drained > DRAIN_BYTES:
                    return
    except TimeoutError:
        return


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response of server-sent events from a generator, which one task iterates and closes.

    The response starts with the first event: an error before that is raised, and gets a status of its own. From then
    on, `comment_seconds` without an event are followed by a comment. A client that takes nothing for `write_timeout`
    seconds is disconnected. The context `within` ends with the response, which has to be called for that.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        within: AbstractContextManager[object] = _NO_CONTEXT,
        write_timeout: float = WRITE_SECONDS,
        comment_seconds: float = COMMENT_SECONDS,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._within = within
        self._write_timeout = write_timeout
        self._comment_seconds = comment_seconds
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._within, Presence.of(scope):
                await self._send_all(send)
        except KVRelayError as error:
            if not self._started:
                raise
            await _cut_off(scope, receive, error)

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            first = await anext(events, b"")
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            with closing(WriteDeadline(self._write_timeout)) as deadline:
                await _send_in_parts(send, first, deadline)
                async with aclosing(IdleComments(send, self._comment_seconds)) as comments:
                    async for event in events:
                        async with comments:
                            if len(event) > _PART_BYTES:
                                await _send_in_parts(send, event, deadline)
                                continue
                            with deadline:
                                await send({"type": "http.response.body", "body": event, "more_body": True})
                with deadline:
                    await send({"type": "http.response.body", "body": b"", "more_body": False})


class WholeAnswer(Response):
    """A JSON response that is not streamed. A large one counts in `untaken` until its last part is written. A client
    that takes nothing for `write_timeout` seconds is disconnected."""

    media_type = "application/json"

    def __init__(self, body: bytes, untaken: UntakenAnswers, *, write_timeout: float = WRITE_SECONDS) -> None:
        super().__init__(body)
        self._bytes = body
        self._untaken = untaken
        self._write_timeout = write_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if len(self._bytes) <= _PART_BYTES:  # a connection may buffer as much anyway
            await super().__call__(scope, receive, send)
            return
        drop = scope.get("state", {}).get(ABORT, _nothing)
        try:
            with Presence.of(scope):
                await self._send_all(send, drop)
        except KVRelayError as error:
            await _cut_off(scope, receive, error)

    async def _send_all(self, send: Send, drop: Callable[[], object]) -> None:
        # Counted no longer in the turn of the last part, after which the connection may have another request.
        with self._untaken.holding(len(self._bytes), drop), closing(WriteDeadline(self._write_timeout)) as deadline:
            with deadline:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await _send_in_parts(send, self._bytes, deadline)
            with deadline:
                await send({"type": "http.response.body", "body": b"", "more_body": False})


def _nothing() -> None:
    pass


async def _cut_off(scope: Scope, receive: Receive, error: KVRelayError) -> None:
    """Drops the connection of a response that has begun: to close it would be to wait until the client has taken what
    is buffered."""
    _logger.debug("answer ended: %s", error)
    if abort := scope.get("state", {}).get(ABORT):
        abort()
        await _disconnected(receive)


async def _send_in_parts(send: Send, data: bytes, deadline: WriteDeadline) -> None:
    """Sends what a client may need long for, such as all log-probabilities of a prompt: it has to take each part in
    time, not the whole. The event loop turns between them, however fast the client is."""
    for begin in range(0, len(data), _PART_BYTES):
        if begin > 0:
            await asyncio.sleep(0)
        with deadline:
            await send({"type": "http.response.body", "body": data[begin : begin + _PART_BYTES], "more_body": True})
