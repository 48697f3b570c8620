"""The fetches of a node that have not returned, so that its watchdog notices one that never will.

A fetch outlives its time while its transport or its device may still write to the destinations: usually a moment. If
they never let go, the request waits for ever, and nobody gets the blocks back.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvrelay.core.errors import KVRelayError


class FetchHungError(KVRelayError):
    """A fetch does not return, and the blocks that it was to fill are in use for ever; only a restart helps."""


@dataclass(frozen=True, slots=True, eq=False)
class _Fetch:
    """One fetch. `origin`: whom it asks, for the log. `ends_at`: when its time is over."""

    origin: str
    ends_at: float


class FetchesUnderWay:
    """One per node, used on its event loop. `now` reads that loop's clock."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._fetches: set[_Fetch] = set()

    @contextmanager
    def fetch(self, origin: str, timeout: float) -> Iterator[None]:
        """Counts the body as a fetch that may take `timeout` seconds."""
        fetch = _Fetch(origin, self._now() + timeout)
        self._fetches.add(fetch)
        try:
            yield
        finally:
            self._fetches.remove(fetch)

    def sign_of_life(self) -> object:
        """Returns the same object for as long as the same fetch is the one that is overdue most."""
        return self._most_overdue() or object()

    def hung(self, seconds: float) -> FetchHungError:
        """Returns the error for a fetch that has been the most overdue one for so long."""
        fetch = self._most_overdue()
        assert fetch is not None, "asked only while one is overdue"
        return FetchHungError(
            f"a fetch from {fetch.origin} has not returned {seconds:g} seconds after its time was over: the transport "
            "or the device still holds its blocks"
        )

    def _most_overdue(self) -> _Fetch | None:
        fetch = min(self._fetches, key=lambda fetch: fetch.ends_at, default=None)
        return None if fetch is None or fetch.ends_at > self._now() else fetch
