"""A node that answers but fails its requests: it gets none for a while, then another chance.

Invariant: only failures that another node might not repeat count; one success makes all of them good.
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
    """Of one node, called `name` in logs. After `max_failures` in a row it is ejected for about `first` seconds; when
    it fails again after that, at once for twice as long, up to `longest`. `random` spreads the routers."""

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
        """A request on this node ended with `error`. While it is ejected only requests from before can."""
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
        """A request on this node went well. While it is ejected that says nothing about those that failed."""
        if not self.is_ejected:
            self.reset()

    def reset(self) -> None:
        """Another process, or a new connection to it."""
        self._num_failures = 0
        self._backoff.reset()
        self._ejected_until = self._clock.now()
