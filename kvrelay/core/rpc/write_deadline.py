"""A limit on how long each write to a stream may wait for the peer, with one timer per stream instead of one per write.

Invariant: a write is cancelled when its time is over, and not before.
"""

import asyncio
from types import TracebackType

from kvrelay.core.errors import CancelledByPeerError

# A peer that takes nothing from its stream for so long counts as gone; until then its stream keeps its resources.
WRITE_SECONDS = 60.0


class WriteDeadline:
    """The limit of one stream: the task that made it enters it around every write, and closes it when the stream ends.

    A write that is not over after `seconds` is cancelled, and the context raises CancelledByPeerError.
    """

    __slots__ = ("_cancelling", "_due", "_expired", "_loop", "_seconds", "_task", "_timer")

    def __init__(self, seconds: float) -> None:
        task = asyncio.current_task()
        assert task is not None, "a write deadline is made in the task that writes"
        self._task = task
        self._loop = task.get_loop()
        self._seconds = seconds
        self._due: float | None = None  # when the current write has to be over, by the loop's time; None between writes
        self._timer: asyncio.TimerHandle | None = None  # kept after its write, for the next one
        self._expired = False
        self._cancelling = 0

    def __enter__(self) -> None:
        self._due = self._loop.time() + self._seconds
        self._cancelling = self._task.cancelling()
        if self._timer is None:
            self._timer = self._loop.call_at(self._due, self._look)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._due = None
        if self._expired:
            self._expired = False
            if self._task.uncancel() <= self._cancelling and isinstance(error, asyncio.CancelledError):
                raise CancelledByPeerError(f"the other side took nothing for {self._seconds:g} seconds") from None

    def close(self) -> None:
        """Ends the limit, once. A task that is cut off refers to its frames, and they to this deadline."""
        del self._task
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer = None
        if self._due is None:
            return  # no write is under way; the next one sets the timer again
        if self._loop.time() < self._due:
            self._timer = self._loop.call_at(self._due, self._look)
            return
        self._expired = True
        self._task.cancel()
