"""Notices that a stream with regular messages has fallen silent, as the stream of a stopped process does.

Invariant: silence is counted in ticks of our own loop. Time in which this loop or this process itself was held up does
not count, so no node is blamed for it.
"""

import asyncio
from types import TracebackType

_TICKS = 10


class Silence:
    """A limit on silence: `async with Silence(limit) as silence:` raises TimeoutError when `silence.broken` was not
    called for `limit` seconds."""

    def __init__(self, limit: float) -> None:
        self._tick = limit / _TICKS
        self._num_ticks = 0
        self._timeout = asyncio.timeout(None)
        self._handle: asyncio.TimerHandle | None = None

    def broken(self) -> None:
        """Notes that a message has come."""
        self._num_ticks = 0

    async def __aenter__(self) -> "Silence":
        await self._timeout.__aenter__()
        self._wait()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._handle is not None:
            self._handle.cancel()
        await self._timeout.__aexit__(kind, error, traceback)

    def _wait(self) -> None:
        self._handle = asyncio.get_running_loop().call_later(self._tick, self._on_tick)

    def _on_tick(self) -> None:
        self._num_ticks += 1
        if self._num_ticks < _TICKS:
            self._wait()
        else:
            self._timeout.reschedule(asyncio.get_running_loop().time())
