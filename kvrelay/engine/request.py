"""What a node asks of the engine, and what the engine answers: plain values, no state."""

from dataclasses import dataclass
from enum import Enum

from kvrelay.core.block_hash import BlockHash
from kvrelay.core.named_block import NamedBlock
from kvrelay.core.outputs import TokenLogprobs, TokenOutput
from kvrelay.core.sampling_params import SamplingParams


class KVRole(Enum):
    """Where a request's KV comes from and goes to."""

    LOCAL = "local"  # computed here, decoded here
    PRODUCE = "produce"  # computed here, ends with its first tokens; every prompt block is named and kept under a lease
    CONSUME = "consume"  # computed elsewhere, decoded here from the second token on


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """`sampling.seed` is drawn. `receive`: blocks are reserved first and filled from outside before the engine
    computes what is left (always so for CONSUME).

    A request may have begun elsewhere: `prior_output_token_ids` are its output so far, `n` is 1 then. The outputs are
    those from index `first_choice_index` on."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    cache_salt: bytes = b""
    role: KVRole = KVRole.LOCAL
    receive: bool = False
    prior_output_token_ids: tuple[int, ...] = ()
    first_choice_index: int = 0

    @property
    def given_token_ids(self) -> tuple[int, ...]:
        """What this engine starts from: the prompt, and the output sampled elsewhere."""
        return self.prompt_token_ids + self.prior_output_token_ids

    @property
    def choices(self) -> range:
        """Indices of the outputs."""
        return range(self.first_choice_index, self.first_choice_index + self.sampling.n)


@dataclass(frozen=True, slots=True)
class Admission:
    """A receiving request has blocks for all its given tokens: the leading `num_cached_tokens` are here, `missing`
    wait for their KV, in order, pinned until `Engine.unpin`.
    """

    request_id: str
    num_cached_tokens: int
    missing: tuple[NamedBlock, ...]


@dataclass(frozen=True, slots=True)
class RequestOutput:
    request_id: str
    output: TokenOutput


@dataclass(frozen=True, slots=True)
class PromptOutput:
    """The given tokens of a request are computed. `num_cached_tokens` were found by name when it was scheduled."""

    request_id: str
    num_cached_tokens: int
    prompt_logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """The engine could not go on with this request; it holds nothing for it any more."""

    request_id: str
    message: str


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Counts at the end of a step."""

    num_requests_running: int
    num_requests_decoding: int  # of the running ones, those that have their first token
    num_requests_waiting: int
    num_queued_tokens: int
    num_free_blocks: int
    num_blocks: int
    num_preemptions: int
    num_leases: int
    num_steps: int
    num_prefilled_tokens: int = 0  # computed in chunks of more than one token, since the start
    prefill_seconds: float = 0.0  # that these steps took
    num_lent_steps: int = 0  # of num_steps, those that began with cores lent by other nodes


@dataclass(frozen=True, slots=True)
class StepResult:
    """Everything that changed since the last result. Order inside each tuple is order of happening.

    `progress`: (request id, leading blocks of the given tokens that have their names) of PRODUCE requests. `stored`
    and `removed` are names. `named` are pinned, to be published: new blocks, and hits where the engine was asked for
    those.
    """

    admissions: tuple[Admission, ...]
    prompts: tuple[PromptOutput, ...]
    outputs: tuple[RequestOutput, ...]
    failures: tuple[RequestFailure, ...]
    named: tuple[NamedBlock, ...]
    progress: tuple[tuple[str, int], ...]
    stored: tuple[BlockHash, ...]
    removed: tuple[BlockHash, ...]
    load: EngineLoad

    @property
    def can_wait(self) -> bool:
        """Whether nobody needs it at once: further tokens of outputs that go on are all that it tells requests."""
        if self.admissions or self.prompts or self.failures or self.progress:
            return False
        return all(item.output.finish_reason is None for item in self.outputs)
