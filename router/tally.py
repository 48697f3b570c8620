"""What a request cost so far: counted as it happens, summed up in its trace.

Invariant: computed and cached tokens together are the prompt, whatever nodes report.
"""

from kvrelay.core.clock import Clock
from router.request import RequestTrace, RoutedRequest


class Tally:
    """One per request; times from `clock`, in seconds since it was made."""

    def __init__(self, request: RoutedRequest, block_size: int, clock: Clock) -> None:
        self._num_prompt_tokens = len(request.prompt_token_ids)
        self._block_size = block_size
        self._clock = clock
        self._began = clock.now()
        self._accepted_after: float | None = None
        self._first_token_after: float | None = None
        self._num_found_tokens = 0  # held or fetched where the prompt is computed
        self._num_recomputed_tokens = 0  # could not be fetched by the decode node
        self._num_transferred_blocks = 0

    def accepted(self) -> None:
        """A node has taken the request."""
        if self._accepted_after is None:
            self._accepted_after = self._clock.now() - self._began

    def first_token(self) -> None:
        self.accepted()
        if self._first_token_after is None:
            self._first_token_after = self._clock.now() - self._began

    def prompt_computed(self, *, num_cached_tokens: int, num_fetched_tokens: int = 0) -> None:
        """By the node that prefills. Tokens it held, and tokens it fetched from others."""
        self._num_found_tokens = num_cached_tokens + num_fetched_tokens
        self._num_transferred_blocks += self._blocks(num_fetched_tokens)

    def decode_ready(self, *, num_fetched_tokens: int, num_recomputed_tokens: int) -> None:
        """By a decode node that did not prefill."""
        self._num_transferred_blocks += self._blocks(num_fetched_tokens)
        self._num_recomputed_tokens = num_recomputed_tokens

    def trace(self, *, prefill_node: str | None, decode_node: str) -> RequestTrace:
        elapsed = self._clock.now() - self._began
        num_prompt_tokens = self._num_prompt_tokens
        num_computed_tokens = num_prompt_tokens - self._num_found_tokens + self._num_recomputed_tokens
        num_computed_tokens = max(0, min(num_computed_tokens, num_prompt_tokens))
        return RequestTrace(
            prefill_node=prefill_node,
            decode_node=decode_node,
            num_prompt_blocks=self._blocks(num_prompt_tokens),
            num_computed_tokens=num_computed_tokens,
            num_cached_tokens=num_prompt_tokens - num_computed_tokens,
            num_transferred_blocks=self._num_transferred_blocks,
            queue_seconds=elapsed if self._accepted_after is None else self._accepted_after,
            ttft_seconds=elapsed if self._first_token_after is None else self._first_token_after,
            e2e_seconds=elapsed,
        )

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
