"""Waits between attempts: doubled each time, each drawn between half and all of it."""

from random import Random


class Backoff:
    """Seconds. One per thing that is tried again; `random` only spreads those who try again."""

    def __init__(self, random: Random, *, first: float = 0.1, longest: float = 2.0) -> None:
        self._first = first
        self._longest = longest
        self._current = first
        self._random = random

    def reset(self) -> None:
        self._current = self._first

    def next(self) -> float:
        wait = self._current * self._random.uniform(0.5, 1.0)
        self._current = min(2 * self._current, self._longest)
        return wait
