"""Logs when something that many requests share begins to fail, and when it works again; not each failure in between.

Invariant: however often something fails and works in turn, it makes at most two lines in `_CALM_SECONDS`.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

_CALM_SECONDS = 10.0  # without a failure, after which something works again
_OVER_SECONDS = 60.0  # without a failure, after which the next one counts as another outage in any case
_CAPACITY = 256  # things that fail, of which the oldest gives way: a node that has ended never works again

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Outage:
    num_failures: int
    last_failed_at: float


class Outages:
    """The outages of several things, each under a name that completes "... works again". `now` reads a monotonic clock,
    in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._outages: dict[str, _Outage] = {}

    def failed(self, name: str, message: str, *args: object) -> None:
        """Logs `message % args` as a warning if this begins an outage, otherwise for debugging only."""
        outage = self._outages.get(name)
        if outage is None or self._now() - outage.last_failed_at >= _OVER_SECONDS:
            _logger.warning(f"{message}; not logged again while it fails", *args)
            outage = self._outages[name] = _Outage(0, 0.0)
            if len(self._outages) > _CAPACITY:
                del self._outages[next(iter(self._outages))]
        else:
            _logger.debug(message, *args)
        outage.num_failures += 1
        outage.last_failed_at = self._now()

    def succeeded(self, name: str) -> None:
        """Ends the outage of `name`, unless there is none, or it has just failed and may do so again."""
        outage = self._outages.get(name)
        if outage is not None and self._now() - outage.last_failed_at >= _CALM_SECONDS:
            how_often = "once" if outage.num_failures == 1 else f"{outage.num_failures} times"
            _logger.info("%s works again; it failed %s", name, how_often)
            del self._outages[name]
