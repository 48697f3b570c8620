"""What a node asks of its engine."""

from dataclasses import dataclass
from enum import Enum

from kvrelay.core.errors import InvalidRequestError
from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.core.model.limits import room_for_output


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
