"""Waits between attempts: doubled each time, each drawn between half and all of it."""

import random


class Backoff:
    """Seconds. One per thing that is tried again."""

    def __init__(self, *, first: float = 0.1, longest: float = 2.0) -> None:
        self._first = first
        self._longest = longest
        self._current = first
        self._random = random.Random()  # noqa: S311  (only spreads those who try again)

    def reset(self) -> None:
        self._current = self._first

    def next(self) -> float:
        wait = self._current * self._random.uniform(0.5, 1.0)
        self._current = min(2 * self._current, self._longest)
        return wait
