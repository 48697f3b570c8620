"""Calls from another thread to an asyncio loop, in order; those that can wait share a turn of the loop with others.

A turn takes the interpreter from the thread, and what it sends costs several processes some work. If calls come faster
than is worth that, they wait until an interval has passed since the last turn, or for a call that cannot wait.
Invariant: every call runs, at the latest one interval after it was added.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any


class LoopCalls:
    """`add` is for any thread, one at a time. `interval` in seconds; 0 lets nothing wait."""

    def __init__(self, loop: asyncio.AbstractEventLoop, interval: float) -> None:
        self._loop = loop
        self._interval = interval
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._is_woken = False  # `_turn` is to run as soon as the loop can
        self._timer: asyncio.TimerHandle | None = None  # of the interval that goes on

    def add(self, function: Callable[..., None], *args: Any, can_wait: bool = False) -> None:
        """Raises RuntimeError when it finds the loop closed."""
        self._calls.append((function, args))
        if not self._is_woken and not (can_wait and self._timer is not None):
            self._is_woken = True
            self._loop.call_soon_threadsafe(self._turn)

    def _turn(self) -> None:
        self._is_woken = False  # before the calls are taken: one that is added now either is taken or wakes us again
        for _ in range(len(self._calls)):
            function, args = self._calls.popleft()
            self._loop.call_soon(function, *args)
        if self._timer is None and self._interval:
            self._timer = self._loop.call_later(self._interval, self._interval_over)

    def _interval_over(self) -> None:
        self._timer = None  # before the look at what waited: from now on nothing does
        if self._calls:
            self._turn()
