"""A thread for a connector's copies, driven from asyncio.

Invariant: when `run` has returned or raised, cancellation included, the function it was given is not running and
will not run.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, Protocol, TypeVar

from kvrelay.core.tasks import uninterrupted

P = ParamSpec("P")
T = TypeVar("T")


class RunsFunctions(Protocol):
    """A thread, or its substitute, that runs functions one after the other, in the order of the calls."""

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T: ...


class Worker:
    """Implements RunsFunctions on a thread of its own."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls a function on the thread; returns or raises what it does. A cancelled caller still waits until the
        function has ended, however often it is cancelled."""
        job = self._executor.submit(function, *args, **kwargs)
        waiter = asyncio.wrap_future(job)
        try:
            return await asyncio.shield(waiter)
        except asyncio.CancelledError:
            job.cancel()  # takes effect only if it has not started
            await uninterrupted(asyncio.wait([waiter]))
            raise

    def stop(self) -> None:
        """Waits for the function that is running, if any, and ends the thread."""
        self._executor.shutdown(wait=True)
