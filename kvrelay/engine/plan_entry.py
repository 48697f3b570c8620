"""From a sequence and how many of its tokens come next to its part in the plan of a step."""

from kvrelay.engine.plan import UNKNOWN_TOKEN, ScheduledSequence
from kvrelay.engine.sampling.sampler import SamplingRow
from kvrelay.engine.sequence import Sequence


def plan_entry(sequence: Sequence, count: int) -> ScheduledSequence:
    """Returns the part of a sequence in a step that computes `count` of its tokens."""
    start = sequence.next_position
    end = start + count
    is_unknown = start == sequence.num_tokens  # the step in flight samples it
    sampling = sequence.request.sampling
    rows: tuple[SamplingRow, ...] = ()
    if end == sequence.num_expected_tokens:
        choices = (sequence.index,) if sequence.has_new_tokens else sequence.request.choices
        rows = tuple(_sampling_row(sequence, choice) for choice in choices)
    prompt_logprobs = None
    if sampling.prompt_logprobs is not None and not sequence.prompt_reported and start < sequence.num_prompt_tokens - 1:
        targets = sequence.token_ids[start + 1 : min(end + 1, sequence.num_prompt_tokens)]
        prompt_logprobs = (sampling.prompt_logprobs, targets)
    return ScheduledSequence(
        token_ids=(UNKNOWN_TOKEN,) if is_unknown else sequence.token_ids[start:end],
        start=start,
        block_table=sequence.block_table[:],
        rows=rows,
        prompt_logprobs=prompt_logprobs,
        input_row=sequence.sampled_row if is_unknown else None,
    )


def _sampling_row(sequence: Sequence, choice_index: int) -> SamplingRow:
    return SamplingRow(
        params=sequence.request.sampling,
        choice_index=choice_index,
        position=sequence.num_expected_tokens,
        num_output_tokens=sequence.num_expected_tokens - sequence.num_prompt_tokens,
        seen=sequence.seen_tokens(),
        fixed=sequence.fixed_edits(),
    )
