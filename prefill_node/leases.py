"""Leases on published blocks: how long a prefill node keeps the blocks that it computed for a request.

Invariant: a lease ends exactly once, by release, by expiry, or early (`stall.py`), whichever comes first; the sweeper
does not depend on traffic.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator

from kvrelay.core.clock import Clock
from kvrelay.core.tasks import begin_task, end_tasks
from kvrelay.node.lease_counts import LeaseCounts

_SWEEP_SECONDS = 1.0

_logger = logging.getLogger(__name__)


class LeaseTable:
    """The leases' deadlines by lease id. Used on the node's loop. `end` is called with the id of every lease that ends,
    `on_sweep` after each sweep."""

    def __init__(
        self,
        clock: Clock,
        end: Callable[[str], None],
        *,
        on_sweep: Callable[[], None] = lambda: None,
        counts: LeaseCounts | None = None,
    ) -> None:
        self._clock = clock
        self._end = end
        self._on_sweep = on_sweep
        self._deadlines: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None
        self.counts = counts or LeaseCounts()

    def __len__(self) -> int:
        return len(self._deadlines)

    def __iter__(self) -> Iterator[str]:
        """Yields the ids, oldest first."""
        return iter(self._deadlines)

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._deadlines

    def start(self, on_failure: Callable[[BaseException], None]) -> None:
        """Starts the sweeper. `on_failure` is called when an unforeseen error has ended it, after which no lease
        expires any more."""
        self._task = begin_task(self._sweep_forever(), name="lease-sweeper", on_failure=on_failure)

    async def close(self) -> None:
        await end_tasks(self._task)
        self.release(list(self._deadlines))

    def open(self, lease_id: str, ttl: float) -> None:
        """Opens a lease for `ttl` seconds."""
        self._deadlines[lease_id] = self._clock.now() + ttl

    def renew(self, lease_ids: Iterable[str], ttl: float) -> list[str]:
        """Renews leases for `ttl` seconds; returns the ids that are not known any more."""
        unknown = []
        for lease_id in lease_ids:
            if lease_id in self._deadlines:
                self._deadlines[lease_id] = self._clock.now() + ttl
            else:
                unknown.append(lease_id)
        return unknown

    def release(self, lease_ids: Iterable[str]) -> None:
        """Ends leases whose readers are done. Idempotent; unknown ids are ignored."""
        self.counts.released += self._end_all(lease_ids)

    def end_early(self, lease_id: str) -> None:
        """Ends a lease because other requests wait for its blocks. Idempotent."""
        self.counts.ended_early += self._end_all([lease_id])

    def sweep(self) -> None:
        """Ends the leases that have expired."""
        now = self._clock.now()
        expired = [lease_id for lease_id, deadline in self._deadlines.items() if deadline <= now]
        for lease_id in expired:
            _logger.warning("lease %s expired: nobody renewed or released it", lease_id)
        self.counts.expired += self._end_all(expired)
        self._on_sweep()

    def _end_all(self, lease_ids: Iterable[str]) -> int:
        """Ends leases; returns how many of the ids were known."""
        ended = [lease_id for lease_id in lease_ids if self._deadlines.pop(lease_id, None) is not None]
        for lease_id in ended:
            self._end(lease_id)
        return len(ended)

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            self.sweep()
