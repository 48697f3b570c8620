"""What the bodies of all HTTP requests together may take in memory, from their arrival until they are done with: their
requests are admitted or refused.

Invariant: bodies that are not small share the budget. Only the oldest of them may exceed it, by what one body may have,
and so never waits: it is always completed, and then the next one is the oldest.
"""

import asyncio
from types import TracebackType
from typing import Self

from kvrelay.core.turns import AFewPerTurn, OneAtATime

# A body up to this size is not counted and never waits: a connection may buffer as much anyway. So large bodies,
# however many and slow, keep no usual request waiting.
SMALL_BYTES = 64 * 1024
# With thousands of biases, which need more bytes than this, to parse a body, to make its call and to check that takes
# milliseconds each.
QUICK_BYTES = 16 * 1024
# If all clients that were refused come back together, streams go on between a few of them and the next.
_SMALL_BODIES_PER_TURN = 16


class BodyBudget:
    """The bytes that all bodies may have together."""

    def __init__(self, max_bytes: int) -> None:
        self._num_left = max_bytes  # less than none if the first body has taken more
        self._shares: dict[BodyShare, None] = {}  # of bodies that are not small, in the order in which they became so
        self.large_bodies = OneAtATime()
        self.small_bodies = AFewPerTurn(_SMALL_BODIES_PER_TURN)

    def share(self) -> "BodyShare":
        """Returns the share of a body that begins to arrive, as a context that gives it back."""
        return BodyShare(self)

    def take(self, share: "BodyShare", num_bytes: int) -> bool:
        """Takes bytes for a share, if there are so many left, or none to take, or no share is older. Tells whether it
        did."""
        self._shares.setdefault(share)
        if num_bytes > max(0, self._num_left) and share is not next(iter(self._shares)):
            return False
        self._num_left -= num_bytes
        return True

    def give_back(self, share: "BodyShare", num_bytes: int) -> None:
        """Ends a share, and lets others that wait go on, the oldest first."""
        if share not in self._shares:
            return  # small, or given back already
        del self._shares[share]
        self._num_left += num_bytes
        for other in self._shares:
            if other.waits and not other.go_on():
                break


class BodyShare:
    """The share of one body."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._length = 0  # of the body by now
        self._num_bytes = 0  # that were taken
        self._num_wanted = 0
        self._granted: asyncio.Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.give_back()

    @property
    def waits(self) -> bool:
        return self._granted is not None and not self._granted.done()

    @property
    def waited_in_vain(self) -> bool:
        """Whether a wait was cancelled."""
        return self._granted is not None and self._granted.cancelled()

    async def hold(self, num_bytes: int) -> None:
        """Counts the body, which has `num_bytes` by now. Waits while there is no room for it."""
        self._length = num_bytes
        if num_bytes <= SMALL_BYTES:
            return
        self._num_wanted = num_bytes
        if not self.go_on():
            self._granted = asyncio.get_running_loop().create_future()
            await self._granted

    async def whole(self) -> None:
        """Lets others have their turn before the work on the body begins, if it is long or others were read with it."""
        await self.turn()
        if not self._num_bytes:
            await self._budget.small_bodies.turn()

    async def turn(self) -> None:
        """Lets others have their turn before the next part of the work on the body. Returns at once if it is quick."""
        if self._num_bytes:
            await self._budget.large_bodies.turn()
        elif self._length > QUICK_BYTES:
            await asyncio.sleep(0)

    def go_on(self) -> bool:
        """Takes what the body wants, and lets it go on, if it may. Tells whether it may."""
        if not self._budget.take(self, self._num_wanted - self._num_bytes):
            return False
        self._num_bytes = self._num_wanted
        if self._granted is not None and not self._granted.done():
            self._granted.set_result(None)
        return True

    def give_back(self) -> None:
        """Ends the share before its context ends; nothing if it has ended."""
        self._budget.give_back(self, self._num_bytes)
        self._num_bytes = 0
