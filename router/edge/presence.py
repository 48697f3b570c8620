"""Whether the client of an HTTP request is still there, told by its connection.

Invariant: work within the context of a presence is cancelled when the client leaves, in the task that does it. So no
task has to wait for that, and a request takes no turns of the event loop for it, each of which is long while hundreds
of streams share the loop.
"""

import asyncio
from types import TracebackType

from starlette.types import Scope

from kvrelay.core.errors import CancelledByPeerError, UnavailableError

# Where an application finds the presence in a request's `state`.
PRESENCE = "kvrelay.presence"


class Presence:
    """The client of one request, as a context for work that only this client wants, one at a time. It raises
    CancelledByPeerError if the client has left or leaves before the work has ended, and UnavailableError if the server
    stops and cancels the request."""

    __slots__ = ("_cancelling", "_has_left", "_task")

    def __init__(self) -> None:
        self._has_left = False
        self._task: asyncio.Task[object] | None = None  # that works in the context
        self._cancelling = 0

    @classmethod
    def of(cls, scope: Scope) -> "Presence":
        """Returns that of a request. A server that is not ours gives none: its client never leaves."""
        presence = scope.get("state", {}).get(PRESENCE)
        return presence if isinstance(presence, cls) else cls()

    def leave(self) -> None:
        """Ends the work, because the client has left. Called from a callback of the loop, never by the work itself."""
        self._has_left = True
        if self._task is not None:
            self._task.cancel()

    def __enter__(self) -> None:
        assert self._task is None, "one work at a time"
        if self._has_left:
            raise _left()
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        assert task is not None
        is_ours = self._has_left and task.uncancel() <= self._cancelling
        if isinstance(error, asyncio.CancelledError):
            # The server that stops would log it as a failure and answer a plain 500.
            raise (_left() if is_ours else UnavailableError("the router is stopping")) from None


def _left() -> CancelledByPeerError:
    return CancelledByPeerError("the client disconnected")
