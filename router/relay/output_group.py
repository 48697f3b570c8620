"""Outputs of a request that are placed together, and what they have been through.

The supervisor of the request owns them, and changes them as things happen.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from kvrelay.core.backoff import Backoff
from kvrelay.core.kv.source import KVSource
from router.relay.attempt import Attempt
from router.relay.loss import Loss, NodeLostError


@dataclass(slots=True)
class OutputGroup:
    """Outputs that are placed together. `losses`: the nodes that had taken them and that they have lost in each way
    since they last got past it. `lost`: why they have to be placed again, if they have to; `lost_at`: since when.
    `doubts_kv`: a loss so far was one that `NodeLostError.doubts_kv` is about. `wait`: the timer that ends their wait
    for a node, and `has_waited` tells whether they have waited since their loss."""

    choices: tuple[int, ...]
    backoff: Backoff
    losses: set[tuple[Loss, KVSource]] = field(default_factory=set)
    lost: NodeLostError | None = None
    lost_at: float = 0.0
    doubts_kv: bool = False
    has_waited: bool = False
    attempt: Attempt | None = None
    wait: asyncio.TimerHandle | None = None

    @property
    def awaited(self) -> str:
        """Returns what the outputs wait for, as part of a sentence."""
        if self.attempt is None or self.attempt.closed:
            return "a decode node to go on at"
        return self.attempt.awaited

    def forgive_losses(self, *, are_first: bool) -> None:
        """Forgets the losses that new tokens show to be no fault of the request. `are_first`: a prefill node has
        sampled them, which does not show that a decode node survives the request."""
        if are_first:
            self.losses = {(loss, node) for loss, node in self.losses if loss is Loss.DECODING}
        else:
            self.losses.clear()
            self.backoff.reset()

    def forget_drained(self, has_drained: Callable[[KVSource], bool]) -> None:
        """Forgets the losses of nodes that have drained, because the request has not ended them."""
        self.losses = {(loss, node) for loss, node in self.losses if not has_drained(node)}

    def stop_waiting(self) -> None:
        if self.wait is not None:
            self.has_waited = True
            self.wait.cancel()
            self.wait = None
