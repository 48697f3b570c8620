"""Ejection of a node that answers but fails its requests: it gets no requests for a while, and then another chance.

Invariant: only failures that another node might not repeat are counted, and one success resets the count.
"""

import logging
from random import Random

from kvrelay.core.backoff import Backoff
from kvrelay.core.clock import Clock
from kvrelay.core.errors import (
    CancelledByPeerError,
    DeadlineError,
    InvalidRequestError,
    KVRelayError,
    OverloadedError,
)

_logger = logging.getLogger(__name__)
_NOT_THE_NODES_FAULT = (InvalidRequestError, CancelledByPeerError, DeadlineError, OverloadedError)


class Outlier:
    """The record of one node's failures; logs call the node `name`. After `max_failures` failures in a row it is
    ejected for about `first` seconds. If the first request after that fails, it is ejected at once for about twice as
    long as before, at most `longest` seconds. `random` varies the times, so that several routers do not come back
    together."""

    def __init__(
        self,
        name: str,
        clock: Clock,
        *,
        max_failures: int = 5,
        first: float = 5.0,
        longest: float = 60.0,
        random: Random | None = None,
    ) -> None:
        self.num_ejections = 0
        self._name = name
        self._clock = clock
        self._max_failures = max_failures
        self._num_failures = 0
        self._backoff = Backoff(first=first, longest=longest, jitter=0.25, random=random)
        self._ejected_until = clock.now()

    @property
    def is_ejected(self) -> bool:
        return self._clock.now() < self._ejected_until

    def failed(self, error: KVRelayError) -> None:
        """Counts a request that ended on this node with `error`, unless the node is ejected: then the request is one
        from before."""
        if isinstance(error, _NOT_THE_NODES_FAULT) or self.is_ejected:
            return
        self._num_failures += 1
        if self._num_failures < self._max_failures:
            return
        wait = self._backoff.next()
        self._ejected_until = self._clock.now() + wait
        self.num_ejections += 1
        _logger.warning(
            "%s has failed %d requests in a row: no more for %.1f s while another one lives (%s)",
            self._name, self._num_failures, wait, error,
        )  # fmt: skip

    def succeeded(self) -> None:
        """Resets the count after a request that went well on this node, unless the node is ejected: then the request is
        one from before."""
        if not self.is_ejected:
            self.reset()

    def reset(self) -> None:
        """Forgets all failures, because the node is another process or was connected anew."""
        self._num_failures = 0
        self._backoff.reset()
        self._ejected_until = self._clock.now()
