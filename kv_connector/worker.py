"""One thread for a connector's copies, driven from asyncio.

Invariant: when `run` has returned or raised, cancellation included, the function it was given is not running and
will not run.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class RunsFunctions(Protocol):
    """One after the other, in the order given."""

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T: ...


class Worker:
    """Implements RunsFunctions."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The function's result. A cancelled caller still waits until the function is over, however often it is
        cancelled.
        """
        job = self._executor.submit(function, *args, **kwargs)
        waiter = asyncio.wrap_future(job)
        try:
            return await asyncio.shield(waiter)
        except asyncio.CancelledError:
            job.cancel()  # takes effect only if it has not started
            while not waiter.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([waiter])
            raise

    def stop(self) -> None:
        """Ends the thread after what it is running now."""
        self._executor.shutdown(wait=True)
