"""Ejection of a node that answers but fails its requests: it gets no requests for a while, and is then on probation, in
which it gets few until one goes well. A whole burst would come otherwise, because an empty node is the cheapest.

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
_MAX_FAILURES = 5
_FIRST_SECONDS, _LONGEST_SECONDS = 5.0, 60.0
_TRIAL_SECONDS = 5.0  # from one request on probation to the next, because the first may take minutes
_NOT_THE_NODES_FAULT = (InvalidRequestError, CancelledByPeerError, DeadlineError, OverloadedError)


class Outlier:
    """The record of one node's failures; logs call the node `name`. After five failures in a row it is ejected for
    about five seconds, and then on probation. If a request fails there, the node is ejected at once for about twice as
    long as before, at most a minute. `random` varies the times, so that several routers do not come back together."""

    def __init__(self, name: str, clock: Clock, random: Random) -> None:
        self.num_ejections = 0
        self._name = name
        self._clock = clock
        self._num_failures = 0
        self._backoff = Backoff(first=_FIRST_SECONDS, longest=_LONGEST_SECONDS, jitter=0.25, random=random)
        self._ejected_until = self._next_trial = clock.now()

    @property
    def is_ejected(self) -> bool:
        return self._clock.now() < self._ejected_until

    @property
    def is_on_probation(self) -> bool:
        """Tells whether an ejection is over and no request has gone well since."""
        return self._num_failures >= _MAX_FAILURES and not self.is_ejected

    @property
    def admits(self) -> bool:
        """Tells whether the node may have one more request now, which `placed` is called for if it gets it."""
        return not self.is_ejected and (not self.is_on_probation or self._clock.now() >= self._next_trial)

    def placed(self) -> None:
        """Notes a request that goes to the node."""
        if self.is_on_probation:
            self._next_trial = self._clock.now() + _TRIAL_SECONDS

    def failed(self, error: KVRelayError) -> None:
        """Counts a request that ended on this node with `error`, unless the node is ejected: then the request is one
        from before."""
        if isinstance(error, _NOT_THE_NODES_FAULT) or self.is_ejected:
            return
        self._num_failures += 1
        if self._num_failures < _MAX_FAILURES:
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
        self._ejected_until = self._next_trial = self._clock.now()
