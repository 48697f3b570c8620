"""What a router counts against the node that computes a prompt.

Invariant: once a charge has ended, the node's handle is what it was without it.
"""

from router.relay.resolved_placement import DecodePlacement, PrefillPlacement


class Charge:
    """The prompt that the node of a placement has to compute. From `begin` until `end`, which may be called at any
    time, and more than once, its tokens count as queued there, and other prompts with the same beginning can follow."""

    __slots__ = ("_is_counted", "_node", "_num_tokens", "_prompt")

    def __init__(self, placement: DecodePlacement | PrefillPlacement) -> None:
        self._node = placement.node
        self._num_tokens = placement.num_uncached_tokens
        self._prompt = placement.beginnings
        self._is_counted = False

    def begin(self) -> None:
        self._is_counted = True
        self._node.num_queued_tokens += self._num_tokens
        self._node.coming.begin(self._prompt)

    def end(self) -> None:
        if self._is_counted:
            self._is_counted = False
            self._node.num_queued_tokens -= self._num_tokens
            self._node.coming.end(self._prompt)
