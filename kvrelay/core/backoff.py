"""Waits between attempts at the same thing: each twice as long as the one before, up to a longest one."""

from random import Random, SystemRandom


class Backoff:
    """The waits, in seconds, of one thing that is tried again. A wait is shortened at random by up to its share
    `jitter`, so that several who try again do not do so together; `random` serves only for that."""

    def __init__(
        self, *, first: float = 0.1, longest: float = 2.0, jitter: float = 0.5, random: Random | None = None
    ) -> None:
        self._first = first
        self._longest = longest
        self._jitter = jitter
        self._current = first
        self._random = random or SystemRandom()

    def reset(self) -> None:
        """Lets the next wait be the first one again."""
        self._current = self._first

    def next(self) -> float:
        wait = self._current * self._random.uniform(1.0 - self._jitter, 1.0)
        self._current = min(2 * self._current, self._longest)
        return wait
