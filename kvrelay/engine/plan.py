"""A step's plan and its result: frozen data between scheduler and runner, which never see each other."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from kvrelay.core.outputs import TokenLogprobs
from kvrelay.engine.sampling.sampler import SampledToken, SamplingRow

UNKNOWN_TOKEN = -1  # no id that a model has: to run it unresolved is an error


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """`token_ids` are run at positions `start` .. and their KV is written into `block_table`.

    `input_row` is set when the token was not known yet: `token_ids` is `(UNKNOWN_TOKEN,)` then, and stands for what the
    step launched before this one samples in that row, counted over all `rows` of its plan.
    `rows` is empty while the prompt is incomplete; otherwise one row per output to sample from the last token's logits.
    `prompt_logprobs` (k, target ids): log-probabilities of the tokens that follow each scheduled prompt token, when
    asked for.
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
    """`copies` (source, destination) block ids are carried out before anything is written."""

    scheduled: tuple[ScheduledSequence, ...]
    copies: tuple[tuple[int, int], ...]

    @property
    def num_scheduled_tokens(self) -> int:
        return sum(entry.num_scheduled_tokens for entry in self.scheduled)


@dataclass(frozen=True, slots=True)
class SequenceResult:
    """For one `ScheduledSequence`: one sampled token per row, and prompt log-probabilities where asked for."""

    sampled: tuple[SampledToken, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """In the order of the plan."""

    results: tuple[SequenceResult, ...]
