"""The values that a node and its engine exchange."""

from dataclasses import dataclass
from enum import Enum

from kvrelay.core.errors import InvalidRequestError, KVRelayError, NotFiniteError
from kvrelay.core.generation.outputs import TokenOutput
from kvrelay.core.generation.prompt_logprobs import PromptLogprobs
from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.core.kv.block_hash import BlockHash
from kvrelay.core.kv.named_block import NamedBlock
from kvrelay.core.model.limits import room_for_output
from kvrelay.core.node_report import NodeLoad
from kvrelay.core.record import record


class KVRole(Enum):
    """Where a request's KV comes from and goes to."""

    LOCAL = "local"  # computed here, decoded here
    PRODUCE = "produce"  # computed here, ends with its first tokens; every prompt block is named and kept under a lease
    CONSUME = "consume"  # computed elsewhere, decoded here from the second token on


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request to an engine. `sampling.seed` must be set. With `receive`, which CONSUME requires, the engine reserves
    blocks for the given tokens, the node fills them from outside, and the engine computes the rest.

    `prior_output_token_ids` is the output so far of a request that began on another node; `n` is then 1. The outputs
    have the indices from `first_choice_index` on. With `yields_to_decodes`, a step that also decodes computes only as
    many tokens of the prompt as are cheap."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    cache_salt: bytes = b""
    role: KVRole = KVRole.LOCAL
    receive: bool = False
    prior_output_token_ids: tuple[int, ...] = ()
    first_choice_index: int = 0
    yields_to_decodes: bool = False

    @property
    def given_token_ids(self) -> tuple[int, ...]:
        """Returns the prompt and the output sampled elsewhere, from which this engine starts."""
        return self.prompt_token_ids + self.prior_output_token_ids

    @property
    def choices(self) -> range:
        """Returns the indices of the outputs."""
        return range(self.first_choice_index, self.first_choice_index + self.sampling.n)

    def check_fits(self, *, max_model_len: int, max_num_seqs: int) -> None:
        """Raises InvalidRequestError if an engine of these limits could not run it to its end."""
        if not self.prompt_token_ids:
            raise InvalidRequestError("the prompt is empty", field="prompt")
        room_for_output(len(self.given_token_ids), max_model_len, field="prompt")
        if self.sampling.n > max_num_seqs:
            raise InvalidRequestError(f"n is above max_num_seqs ({max_num_seqs})", field="n")


@dataclass(frozen=True, slots=True)
class Reservation:
    """The report that a receiving request has blocks for all its given tokens. The KV of the first `num_cached_tokens`
    is here; the blocks in `missing`, in order, wait for theirs.
    """

    request_id: str
    num_cached_tokens: int
    missing: tuple[NamedBlock, ...]


@record
class SequenceOutput:
    """New tokens of one output of a request."""

    request_id: str
    output: TokenOutput


@dataclass(frozen=True, slots=True)
class PromptOutput:
    """The report that a request's given tokens are computed. `num_cached_tokens` of them were found by name when it was
    scheduled; what a preempted request then finds of its own is not counted."""

    request_id: str
    num_cached_tokens: int
    prompt_logprobs: PromptLogprobs


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """The report that a request has failed. The engine holds nothing for it any more. `is_not_finite`: its logits are
    not finite."""

    request_id: str
    message: str
    is_not_finite: bool = False

    @property
    def error(self) -> KVRelayError:
        """Returns it as an error for others to hear."""
        return NotFiniteError(self.message) if self.is_not_finite else KVRelayError(self.message)


@dataclass(frozen=True, slots=True)
class EngineLoad(NodeLoad):
    """Counts at the end of a step: those that a node reports to routers, and more for the node itself.
    `first_lacking`: the arrival number of the first sequence that lacks blocks or a place while others may overtake it,
    0 if none does."""

    num_prefilled_tokens: int = 0  # computed in chunks of more than one token, since the start
    prefill_seconds: float = 0.0  # that these steps took
    first_lacking: int = 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """Everything that changed since the last result, in order within each tuple.

    `progress` has pairs (request id, number of leading blocks that have their names) of PRODUCE requests. `stored` and
    `removed` are the names that the pool has gained and lost. The blocks in `named` are pinned for the node to publish:
    new blocks, and with `publish_hits` those found by name. The names in `distrusted` were lost because the content
    under them may be wrong.
    """

    reservations: tuple[Reservation, ...]
    prompts: tuple[PromptOutput, ...]
    outputs: tuple[SequenceOutput, ...]
    failures: tuple[RequestFailure, ...]
    named: tuple[NamedBlock, ...]
    progress: tuple[tuple[str, int], ...]
    distrusted: tuple[BlockHash, ...]
    stored: tuple[BlockHash, ...]
    removed: tuple[BlockHash, ...]
    load: EngineLoad

    @property
    def can_wait(self) -> bool:
        """Tells whether the result may be delivered late: all it has for requests is further tokens of outputs that
        continue."""
        if self.reservations or self.prompts or self.failures or self.progress:
            return False
        return all(item.output.finish_reason is None for item in self.outputs)
