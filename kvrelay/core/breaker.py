"""A circuit breaker: a server or a peer that keeps failing is left alone for a while and then tried once.

Closed, it admits every attempt. After `threshold` failures in a row it opens and admits none until a wait is over, then
one (half open). If that fails, the next wait is twice as long; the actual one is drawn between half and all of it. A
success closes it.
It logs nothing: its owner does, through `Outages`.

Invariant: whoever was admitted calls `succeeded`, `failed` or `abandoned`, once. Of those admitted since it opened, at
most one is under way.
"""

from random import Random
from typing import NewType

from kvrelay.core.backoff import Backoff
from kvrelay.core.clock import Clock

Permit = NewType("Permit", object)
"""Stands for an attempt that was admitted; it has nothing but its identity."""


class CircuitBreaker:
    """The breaker of one server or peer, used from one loop. `random` draws the waits."""

    def __init__(self, clock: Clock, *, threshold: int = 3, random: Random | None = None) -> None:
        self._clock = clock
        self._threshold = threshold
        self._backoff = Backoff(first=0.5, longest=30.0, random=random)
        self._failures = 0
        self._retry_at: float | None = None  # None: closed
        self._trial: Permit | None = None  # of the attempt that an open breaker has admitted

    @property
    def is_open(self) -> bool:
        """Tells whether it has opened and nothing has succeeded since."""
        return self._retry_at is not None

    @property
    def admits(self) -> bool:
        """Tells whether `admit` returns a permit now."""
        return self._retry_at is None or (self._trial is None and self._clock.now() >= self._retry_at)

    def admit(self) -> Permit | None:
        """Returns a permit, with which the end of the attempt is reported, or None if there is to be none."""
        if not self.admits:
            return None
        permit = Permit(object())
        if self._retry_at is not None:
            self._trial = permit
        return permit

    def succeeded(self) -> None:
        self._retry_at = self._trial = None
        self._failures = 0
        self._backoff.reset()

    def failed(self, permit: Permit) -> None:
        self._failures += 1
        if self._retry_at is not None and permit is not self._trial:
            return  # admitted before the breaker opened
        if self._failures < self._threshold:
            return
        self._retry_at = self._clock.now() + self._backoff.next()
        self._trial = None

    def abandoned(self, permit: Permit) -> None:
        """Ends an attempt that says nothing about the server, because it was cancelled or had too little time."""
        if permit is self._trial:
            self._trial = None
