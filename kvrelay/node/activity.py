"""What a node has to finish before it may exit: requests, and the leases that outlive them.

Invariant: `idle` returns only when everything that began has ended.
"""

import asyncio


class Activity:
    """The names of what is under way. Used on the node's loop. Beginning or ending one twice has no effect."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._names)

    def begin(self, name: str) -> None:
        self._names.add(name)
        self._idle.clear()

    def end(self, name: str) -> None:
        self._names.discard(name)
        if not self._names:
            self._idle.set()

    async def idle(self) -> None:
        await self._idle.wait()
