"""The plan of a step and its result: the only data that scheduler and runner exchange."""

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from kvrelay.core.generation.prompt_logprobs import PromptLogprobs
from kvrelay.core.record import record
from kvrelay.engine.sampling.sampler import NO_TOKEN, SampledToken, SamplingRow

UNKNOWN_TOKEN = -1  # no model has this id, so running it is an error


@record
class ScheduledSequence:
    """The part of one sequence in a step: `token_ids` are computed at positions from `start` on, and their KV is
    written into the blocks of `block_table`.

    `input_row` is set if the token is not known yet. `token_ids` is then `(UNKNOWN_TOKEN,)`, and stands for the token
    that the step launched before this one samples in that row; rows are counted over all `rows` of that step's plan.
    `rows` has one entry per output to sample from the last token's logits, and is empty while the prompt is incomplete.
    `prompt_logprobs` is (k, target ids) if log-probabilities of the prompt were asked for: one target for each
    scheduled prompt token, the token that follows it.
    """

    token_ids: SequenceOf[int]
    start: int
    block_table: SequenceOf[int]
    rows: tuple[SamplingRow, ...]
    prompt_logprobs: tuple[int, SequenceOf[int]] | None = None
    input_row: int | None = None

    @property
    def num_scheduled_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The plan of a step. `copies` are pairs of block ids (source, destination), copied before the step writes any
    KV."""

    scheduled: tuple[ScheduledSequence, ...]
    copies: tuple[tuple[int, int], ...]

    @property
    def num_scheduled_tokens(self) -> int:
        return sum(entry.num_scheduled_tokens for entry in self.scheduled)


@record
class SequenceResult:
    """The result of one `ScheduledSequence`: one sampled token per row, and the prompt log-probabilities it asked
    for."""

    sampled: tuple[SampledToken, ...]
    prompt_logprobs: PromptLogprobs | None = None

    @property
    def is_finite(self) -> bool:
        """Tells whether the logits behind it were finite."""
        if any(sampled.token_id == NO_TOKEN for sampled in self.sampled):
            return False
        # An infinity among the logits makes NaN of every log-probability of its row; a token can have that of zero.
        return self.prompt_logprobs is None or not any(map(math.isnan, self.prompt_logprobs.logprobs))


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """The results of a step, in the order of its plan."""

    results: tuple[SequenceResult, ...]
