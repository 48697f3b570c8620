"""A request inside the router, after validation: nothing in here can be wrong any more.

The edge (HTTP gateway, gRPC service) makes a `RoutedRequest` and reads `RequestEvent`s; the supervisor turns one into
the other.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from kvrelay.core.block_hash import KVNamespace
from kvrelay.core.outputs import TokenLogprobs, TokenOutput
from kvrelay.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """`sampling.seed` is drawn, `max_tokens` fits the model. `timeout` in seconds is what is left of the client's
    patience.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    timeout: float
    priority: int = 0
    cache_salt: bytes = b""


@dataclass(frozen=True, slots=True)
class NodeRequest:
    """What one placement asks of its nodes: all outputs of a request, or, after a node was lost (`is_replay`), one of
    them from where it stopped.

    `token_ids`: the prompt and `num_prior_output_tokens` tokens the client has already; with any of these
    `sampling.n` is 1. The outputs asked for are those from index `first_choice_index` on. `kv_namespace`: of the model
    that the request began with.
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
    def choices(self) -> range:
        """Indices of the outputs."""
        return range(self.first_choice_index, self.first_choice_index + self.sampling.n)


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """For prompt tokens 1.., in order; comes before the first token when asked for."""

    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class KVOrigins:
    """Blocks that no node had to compute where they were needed, by where they came from; and tokens that were computed
    more than once: by a second prefill node, by the decode node, after a node was lost."""

    num_prefill_node_blocks: int = 0
    num_holder_blocks: int = 0
    num_store_blocks: int = 0
    num_refill_blocks: int = 0
    num_refilled_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_replayed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """How the request was served; always the last event. Times in seconds.

    `prefill_node` gave the first token, `decode_node` the last one; `num_migrations` counts the placements beyond the
    first, because a node was lost.
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
    """What the live nodes agree on. Raised limits would need other nodes."""

    max_model_len: int
    vocab_size: int
    kv_namespace: KVNamespace


class Relay(Protocol):
    """The router's inside, as its edge sees it."""

    def served_model(self) -> ServedModel:
        """Raises UnavailableError while no node that can decode is known."""
        ...

    def check_capacity(self, num_admitting: int = 0, num_wanted: int = 1) -> None:
        """Raises OverloadedError when not all of `num_wanted` requests may run beside those that do, waiting ones
        included, and `num_admitting` more; InvalidRequestError when so many never may."""
        ...

    def run(self, request: RoutedRequest) -> AsyncGenerator[RequestEvent, None]:
        """Serve one request: PromptLogprobs (if asked), TokenOutputs of every choice until each has a finish reason,
        RequestTrace.

        Raises a KVRelayError instead when it cannot. Closing the generator early aborts the request on every node;
        whoever stops iterating must close it (`contextlib.aclosing`)."""
        ...

    def finish(self, request_id: str, index: int) -> None:
        """The client has all it wants of this output (a stop string): it counts as finished, and when all are, the
        nodes are told to stop and the trace follows. What was under way may still come; unknown ids are ignored."""
        ...

    def abort(self, request_id: str) -> None:
        """Ends a running request with CancelledByPeerError; unknown ids are ignored."""
        ...
