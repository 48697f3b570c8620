"""What a router counts against the node that computes a prompt.

Invariant: once a charge has ended, the node's count is what it was without it.
"""

from router.relay.resolved_placement import DecodePlacement, PrefillPlacement


class Charge:
    """The tokens of a prompt that the node of a placement has to compute. They count as queued there from `begin` until
    `end`, which may be called at any time, and more than once."""

    __slots__ = ("_node", "_num_counted", "_num_tokens")

    def __init__(self, placement: DecodePlacement | PrefillPlacement) -> None:
        self._node = placement.node
        self._num_tokens = placement.num_uncached_tokens
        self._num_counted = 0

    def begin(self) -> None:
        self._num_counted = self._num_tokens
        self._node.num_queued_tokens += self._num_counted

    def end(self) -> None:
        self._node.num_queued_tokens -= self._num_counted
        self._num_counted = 0
