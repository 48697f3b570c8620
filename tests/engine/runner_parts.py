"""What the runners without a model have in common, here and in the simulation."""

from collections.abc import Sequence
from dataclasses import replace

from kvrelay.core.generation.outputs import TokenLogprobs
from kvrelay.core.generation.prompt_logprobs import PromptLogprobs
from kvrelay.engine.plan import ScheduledSequence, SequenceResult
from kvrelay.engine.sampling.sampler import SampledToken


def resolved(entry: ScheduledSequence, last_sampled: Sequence[int]) -> ScheduledSequence:
    """Fills in the token that was unknown when the step was planned, from the samples of the step before."""
    if entry.input_row is None:
        return entry
    return replace(entry, token_ids=(last_sampled[entry.input_row],), input_row=None)


def result_of(entry: ScheduledSequence, sampled: tuple[SampledToken, ...]) -> SequenceResult:
    """Returns the result of an entry, with made-up log-probabilities of its prompt if they are wanted."""
    if entry.prompt_logprobs is None:
        return SequenceResult(sampled)
    _, targets = entry.prompt_logprobs
    return SequenceResult(sampled, PromptLogprobs.of(TokenLogprobs(target, -1.0, 1) for target in targets))
