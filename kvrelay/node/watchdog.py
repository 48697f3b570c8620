"""Notices that the engine's thread hangs, with or without traffic, or that a fetch does not return.

An idle engine also makes a turn about once a second, so one that makes none is stuck in a step or in a message.
Invariant: time is counted in checks by our own loop, so that a process that was stopped as a whole does not count as
hanging.
"""

import asyncio
from collections.abc import Callable

from kvrelay.core.errors import KVRelayError
from kvrelay.core.tasks import begin_task, end_tasks

_LONGEST_INTERVAL_SECONDS = 1.0


class EngineHungError(KVRelayError):
    """The engine makes no step any more; only a restart helps."""

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"the engine has made no step for {seconds:g} seconds; if its steps may take that long, raise "
            "--step-timeout or lower --max-num-batched-tokens"
        )


class Watchdog:
    """A task that checks that what `sign_of_life` returns changes, such as the number of turns of the engine's thread.
    `on_hang` is called once, on the loop, when it has not changed for `timeout` seconds, with what `error` makes of
    them."""

    def __init__(
        self,
        sign_of_life: Callable[[], object],
        error: Callable[[float], BaseException],
        on_hang: Callable[[BaseException], None],
        *,
        timeout: float,
    ) -> None:
        self._sign_of_life = sign_of_life
        self._error = error
        self._on_hang = on_hang
        self._timeout = timeout
        self._interval = min(_LONGEST_INTERVAL_SECONDS, timeout / 4)
        self._seen: object = object()
        self._still_seconds = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = begin_task(self._check_forever(), name="watchdog", on_failure=self._on_hang)

    async def close(self) -> None:
        await end_tasks(self._task)

    def check(self) -> bool:
        """Checks once, one interval after the last time; returns whether what it watches still works."""
        seen = self._sign_of_life()
        self._still_seconds = self._still_seconds + self._interval if seen == self._seen else 0.0
        self._seen = seen
        return self._still_seconds < self._timeout

    async def _check_forever(self) -> None:
        while True:
            if not self.check():
                break
            await asyncio.sleep(self._interval)
        self._on_hang(self._error(self._timeout))
