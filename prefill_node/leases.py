"""Leases on published blocks: until when a prefill node keeps what it computed for a request.

Invariant: a lease ends exactly once, by release or by expiry, whichever comes first; the sweeper does not depend on
traffic.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator

from kvrelay.core.clock import Clock

_logger = logging.getLogger(__name__)


class LeaseTable:
    """Deadlines by lease id, on the node's loop. `end` is called with the id of every lease that ends, `on_sweep` after
    each sweep.
    """

    def __init__(
        self,
        clock: Clock,
        end: Callable[[str], None],
        *,
        sweep_interval: float = 1.0,
        on_sweep: Callable[[], None] = lambda: None,
    ) -> None:
        self._clock = clock
        self._end = end
        self._on_sweep = on_sweep
        self._sweep_interval = sweep_interval
        self._deadlines: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None
        self.num_expired = 0

    def __len__(self) -> int:
        return len(self._deadlines)

    def __iter__(self) -> Iterator[str]:
        """Oldest first."""
        return iter(self._deadlines)

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._deadlines

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._sweep_forever(), name="lease-sweeper")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.release(list(self._deadlines))

    def open(self, lease_id: str, ttl: float) -> None:
        """`ttl` in seconds from now."""
        self._deadlines[lease_id] = self._clock.now() + ttl

    def renew(self, lease_ids: Iterable[str], ttl: float) -> list[str]:
        """Returns the ids that are not known any more."""
        unknown = []
        for lease_id in lease_ids:
            if lease_id in self._deadlines:
                self._deadlines[lease_id] = self._clock.now() + ttl
            else:
                unknown.append(lease_id)
        return unknown

    def release(self, lease_ids: Iterable[str]) -> None:
        """Idempotent; unknown ids are ignored."""
        for lease_id in lease_ids:
            if self._deadlines.pop(lease_id, None) is not None:
                self._end(lease_id)

    def sweep(self) -> None:
        """Ends what has expired."""
        now = self._clock.now()
        expired = [lease_id for lease_id, deadline in self._deadlines.items() if deadline <= now]
        for lease_id in expired:
            _logger.warning("lease %s expired: nobody renewed or released it", lease_id)
        self.num_expired += len(expired)
        self.release(expired)
        self._on_sweep()

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(self._sweep_interval)
            self.sweep()
