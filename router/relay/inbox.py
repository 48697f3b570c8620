"""What has happened to a request and was not handled yet: mostly tokens that its client has not taken. Inboxes share a
limit.

Invariant: all inboxes together have at most `max_items`. Beyond that the fullest one is emptied, and its owner puts in
one more item, which ends the request.
"""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

# A token takes some hundred bytes here, and with log-probabilities up to some thousand.
MAX_ITEMS = 2**19

T = TypeVar("T")


class Inboxes(Generic[T]):
    """The inboxes of all requests of a router."""

    def __init__(self, max_items: int = MAX_ITEMS) -> None:
        self._max_items = max_items
        self._num_items = 0
        self._on_too_full: dict[Inbox[T], Callable[[], None]] = {}

    def open(self, on_too_full: Callable[[], None]) -> "Inbox[T]":
        """Returns a new inbox. `on_too_full` is called when all together have too much and this one has the most of
        it, which was thrown away by then."""
        inbox = Inbox(self)
        self._on_too_full[inbox] = on_too_full
        return inbox

    def took(self, num_items: int = 1) -> None:
        self._num_items -= num_items

    def put(self) -> None:
        self._num_items += 1
        if self._num_items > self._max_items:
            fullest = max(self._on_too_full, key=Inbox.qsize)
            fullest.clear()
            self._on_too_full[fullest]()

    def closed(self, inbox: "Inbox[T]") -> None:
        self._on_too_full.pop(inbox, None)


class Inbox(asyncio.Queue[T]):
    """The inbox of one request. One that is closed takes nothing any more."""

    def __init__(self, inboxes: Inboxes[T]) -> None:
        super().__init__()
        self._inboxes = inboxes
        self._closed = False

    def put_nowait(self, item: T) -> None:
        if not self._closed:
            super().put_nowait(item)
            self._inboxes.put()

    def get_nowait(self) -> T:
        item = super().get_nowait()
        self._inboxes.took()
        return item

    def clear(self) -> None:
        num_items = self.qsize()
        self._init(self.maxsize)  # as when it was made: there may be half a million items to throw away
        self._inboxes.took(num_items)

    def close(self) -> None:
        """Throws away what nobody has read."""
        self._closed = True
        self.clear()
        self._inboxes.closed(self)
