"""Long work on an event loop, cut into pieces or done one after the other, so that others get their turn in between."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TypeVar

ITEMS_AT_A_TIME = 64  # such as the log-probabilities of as many tokens: a millisecond or two

T = TypeVar("T")
R = TypeVar("R")


class OneAtATime:
    """Lets those that come go on one after the other, each in a turn of the event loop of its own."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def turn(self) -> None:
        """Returns in a turn of the event loop in which it returns to nobody else."""
        async with self._lock:
            await asyncio.sleep(0)


class AFewPerTurn:
    """Lets at most so many go on in one turn of the event loop, and the others in later turns, in their order. Those
    that do not come together go on at once."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._num_left = most
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def turn(self) -> None:
        """Returns in a turn of the event loop in which it returns to few others."""
        loop = asyncio.get_running_loop()
        if self._num_left == self._most:
            loop.call_soon(self._begin_turn)
        if self._num_left:
            self._num_left -= 1
            return
        waiting = loop.create_future()
        self._waiting.append(waiting)
        await waiting

    def _begin_turn(self) -> None:
        self._num_left = self._most
        while self._waiting and self._num_left:
            waiting = self._waiting.popleft()
            if not waiting.done():  # cancelled
                waiting.set_result(None)
                self._num_left -= 1
        if self._num_left < self._most:
            asyncio.get_running_loop().call_soon(self._begin_turn)


async def in_turns(convert: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Returns `convert` of each item. The event loop turns after a few of them, because there may be very many."""
    converted: list[R] = []
    left = map(convert, items)
    while some := list(islice(left, ITEMS_AT_A_TIME)):
        converted += some
        await asyncio.sleep(0)
    return converted
