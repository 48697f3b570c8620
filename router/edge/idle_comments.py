"""Comments in a stream of server-sent events that has nothing else to say, with one timer per stream instead of one per
event: proxies close connections on which nothing comes for a while, often a minute.

Invariant: a comment stands between two events, and none is written once the stream has ended.
"""

import asyncio
from types import TracebackType

from starlette.types import Send

from kvrelay.core.tasks import end_tasks

COMMENT_SECONDS = 15.0
COMMENT = b": waiting\n\n"  # that clients ignore (https://html.spec.whatwg.org/multipage/server-sent-events.html)


class IdleComments:
    """The comments of one stream whose response has begun: its task enters them around every event that it writes, and
    closes them when it ends.

    After each `seconds` without an event, a task of its own sends a comment. It makes way for the next event: if the
    client takes nothing, it is that event which waits.
    """

    __slots__ = ("_comment", "_due", "_is_writing", "_loop", "_seconds", "_send", "_timer")

    def __init__(self, send: Send, seconds: float) -> None:
        self._send = send
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._is_writing = False
        self._comment: asyncio.Task[None] | None = None
        self._due = self._loop.time() + seconds  # of the next comment
        self._timer = self._loop.call_at(self._due, self._look)

    async def __aenter__(self) -> None:
        self._is_writing = True
        await self._end_comment()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_writing = False
        self._due = self._loop.time() + self._seconds

    async def aclose(self) -> None:
        self._timer.cancel()
        await self._end_comment()

    async def _end_comment(self) -> None:
        if self._comment is not None:
            await end_tasks(self._comment)  # it has been written, or waits for the client and never will be
            self._comment = None

    def _look(self) -> None:
        now = self._loop.time()
        if now >= self._due:
            if not self._is_writing and (self._comment is None or self._comment.done()):
                self._comment = self._loop.create_task(self._write())
            self._due = now + self._seconds
        self._timer = self._loop.call_at(self._due, self._look)

    async def _write(self) -> None:
        await self._send({"type": "http.response.body", "body": COMMENT, "more_body": True})
