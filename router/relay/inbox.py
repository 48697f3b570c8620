"""What has happened to a request and was not handled yet: mostly tokens that its client has not taken. Inboxes share a
limit.

Invariant: all inboxes together have at most `max_tokens`. Beyond that the fullest one is emptied, and its owner puts in
one more item, which ends the request.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

# A token takes some hundred bytes here, and with log-probabilities up to some thousand.
MAX_TOKENS = 2**19

T = TypeVar("T")


class Inboxes(Generic[T]):
    """The inboxes of all requests of a router."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._on_too_full: dict[Inbox[T], Callable[[], None]] = {}

    def open(self, on_too_full: Callable[[], None]) -> "Inbox[T]":
        """Returns a new inbox. `on_too_full` is called when all together have too much and this one has the most of
        it, which was thrown away by then."""
        inbox = Inbox(self)
        self._on_too_full[inbox] = on_too_full
        return inbox

    def took(self, num_tokens: int) -> None:
        self._num_tokens -= num_tokens

    def put(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens
        if self._num_tokens > self._max_tokens:
            fullest = max(self._on_too_full, key=lambda inbox: inbox.num_tokens)
            fullest.clear()
            self._on_too_full[fullest]()

    def closed(self, inbox: "Inbox[T]") -> None:
        self._on_too_full.pop(inbox, None)


class Inbox(asyncio.Queue[T]):
    """The inbox of one request, with `num_tokens` in it. One that is closed takes nothing any more."""

    def __init__(self, inboxes: Inboxes[T]) -> None:
        super().__init__()
        self._inboxes = inboxes
        self._sizes: deque[int] = deque()
        self._closed = False
        self.num_tokens = 0

    def put_nowait(self, item: T, num_tokens: int = 1) -> None:
        """Puts in an item with so many tokens; one without any counts as one."""
        if not self._closed:
            super().put_nowait(item)
            self._sizes.append(num_tokens)
            self.num_tokens += num_tokens
            self._inboxes.put(num_tokens)

    def get_nowait(self) -> T:
        item = super().get_nowait()
        num_tokens = self._sizes.popleft()
        self.num_tokens -= num_tokens
        self._inboxes.took(num_tokens)
        return item

    def clear(self) -> None:
        num_tokens, self.num_tokens = self.num_tokens, 0
        self._init(self.maxsize)  # as when it was made: there may be half a million items to throw away
        self._sizes = deque()
        self._inboxes.took(num_tokens)

    def close(self) -> None:
        """Throws away what nobody has read."""
        self._closed = True
        self.clear()
        self._inboxes.closed(self)
