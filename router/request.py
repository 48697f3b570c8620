"""A request inside the router, after validation: nothing in here can be invalid any more.

The edge (HTTP gateway, gRPC service) makes a `RoutedRequest`; the request's supervisor serves it and answers with
`RequestEvent`s.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from kvrelay.core.generation.outputs import TokenOutput
from kvrelay.core.generation.prompt_logprobs import PromptLogprobs
from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.core.kv.block_hash import KVNamespace


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """A valid request: its seed is drawn, and `max_tokens` fits the model's length. `kv_namespace` is that of the model
    for which it is valid. `timeout`: seconds that the request may take from now on."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    kv_namespace: KVNamespace
    timeout: float
    priority: int = 0
    cache_salt: bytes = b""

    def is_over_after(self, seconds: float) -> bool:
        """Tells whether a client that leaves so long after the request began does so because its time is over. gRPC
        ends a call at the client's deadline, which it tells us rounded up by as much as 1%."""
        return seconds >= 0.98 * self.timeout


@dataclass(frozen=True, slots=True)
class NodeRequest:
    """What one placement asks of its nodes: all outputs of a request or, after a node was lost (`is_replay`), those
    that are placed again.

    `token_ids` is the prompt, followed by the `num_prior_output_tokens` tokens that the client already has; if there
    are any, `sampling.n` is 1. The outputs have the indices from `first_choice_index` on. `kv_namespace` is that of the
    model with which the request began.
    """

    token_ids: tuple[int, ...]
    sampling: SamplingParams
    kv_namespace: KVNamespace
    priority: int
    cache_salt: bytes
    num_prior_output_tokens: int
    first_choice_index: int
    is_replay: bool

    @property
    def max_num_tokens(self) -> int:
        """Returns the most tokens that the prompt and an output can have together."""
        return len(self.token_ids) - self.num_prior_output_tokens + self.sampling.max_tokens

    @property
    def ends_with_next_token(self) -> bool:
        """Tells whether every output has its last token with the next one, so that a prompt which is prefilled
        elsewhere is never decoded."""
        return self.num_prior_output_tokens + 1 == self.sampling.max_tokens

    @property
    def choices(self) -> range:
        """Returns the indices of the outputs asked for."""
        return range(self.first_choice_index, self.first_choice_index + self.sampling.n)


@dataclass(frozen=True, slots=True)
class KVOrigins:
    """Where the KV of a request came from: blocks that were fetched, by source, and tokens that were computed more than
    once: by a second prefill node (refilled), by the decode node (recomputed), or after a node was lost (replayed)."""

    num_prefill_node_blocks: int = 0
    num_holder_blocks: int = 0
    num_store_blocks: int = 0
    num_refill_blocks: int = 0
    num_refilled_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_replayed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """How a request was served; always its last event. Times are in seconds, from when the router began it unless
    stated otherwise.

    `prefill_node` sampled the first token, `decode_node` the last one, or was to. `queue_seconds` end when a node
    accepts the request, or with its first token if a decode node prefills it by itself. `num_migrations` counts the
    placements beyond the first, each made because a node was lost.
    """

    prefill_node: str | None
    decode_node: str
    num_prompt_blocks: int
    num_computed_tokens: int  # prompt tokens computed, on whichever node
    num_cached_tokens: int  # prompt tokens no node had to compute
    num_transferred_blocks: int
    queue_seconds: float
    ttft_seconds: float
    e2e_seconds: float
    num_migrations: int = 0
    kv: KVOrigins = KVOrigins()
    handover_seconds: float = 0.0  # from the first token until the decode node had its KV and went on from it


RequestEvent = TokenOutput | PromptLogprobs | RequestTrace


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What every live node can serve: the smallest `max_model_len` and `max_num_seqs` of all, and what they all have in
    common."""

    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    kv_namespace: KVNamespace


class Relay(Protocol):
    """What the edge uses of the router: it serves requests on nodes that the edge does not know."""

    def served_model(self) -> ServedModel:
        """Returns what the live nodes serve. Raises UnavailableError while no decode node is live."""
        ...

    def check_capacity(self, num_admitting: int = 0, num_wanted: int = 1) -> None:
        """Raises OverloadedError if `num_wanted` more requests would exceed the limit, together with those that run or
        wait and with `num_admitting` others; InvalidRequestError if `num_wanted` alone exceeds it."""
        ...

    def run(self, request: RoutedRequest) -> AsyncGenerator[RequestEvent, None]:
        """Serves one request. Yields PromptLogprobs (if requested), then TokenOutputs of every choice until each has a
        finish reason, then the RequestTrace.

        Raises a KVRelayError if the request fails; InvalidRequestError at once if a request of its id is running.
        Closing the generator early aborts the request on every node; a caller that stops iterating must close it
        (`contextlib.aclosing`)."""
        ...

    def finish(self, request_id: str, index: int) -> None:
        """Marks an output as finished because the client needs no more of it (a stop string matched). Its node is told
        to end it; when all outputs are finished, the trace follows. Tokens that were already under way may still come.
        Unknown ids are ignored."""
        ...

    def abort(self, request_id: str) -> None:
        """Ends a running request with CancelledByPeerError; unknown ids are ignored."""
        ...
