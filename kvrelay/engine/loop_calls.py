"""Calls from another thread to an asyncio loop, in order. Calls that can wait share a turn of the loop.

A turn takes the interpreter from the calling thread, and the messages it sends cost other processes CPU time. Calls
that can wait are therefore held until an interval has passed since the last turn, or until a call that cannot wait.
Invariant: every call runs, at the latest one interval after it was added.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any


class LoopCalls:
    """A queue of calls to `loop`. Any thread may call `add`, one at a time. `interval` is in seconds; with 0 no call
    waits."""

    def __init__(self, loop: asyncio.AbstractEventLoop, interval: float) -> None:
        self._loop = loop
        self._interval = interval
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._is_woken = False  # the loop has been asked to run `_turn`
        self._timer: asyncio.TimerHandle | None = None  # runs while an interval lasts

    def add(self, function: Callable[..., None], *args: Any, can_wait: bool = False) -> None:
        """Adds a call of `function(*args)` on the loop. Raises RuntimeError if the loop is closed."""
        self._calls.append((function, args))
        if not self._is_woken and not (can_wait and self._timer is not None):
            self._is_woken = True
            self._loop.call_soon_threadsafe(self._turn)

    def _turn(self) -> None:
        self._is_woken = False  # first, so that a call added from now on is either taken below or wakes the loop
        for _ in range(len(self._calls)):
            function, args = self._calls.popleft()
            self._loop.call_soon(function, *args)
        if self._timer is None and self._interval:
            self._timer = self._loop.call_later(self._interval, self._interval_over)

    def _interval_over(self) -> None:
        self._timer = None  # first, so that a call added from now on does not wait for this timer
        if self._calls:
            self._turn()
