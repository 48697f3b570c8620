"""What a model allows of a request, up to its ends, and what an error says."""

from collections.abc import Callable
from typing import Any

import pytest

from kvrelay.core.errors import InvalidRequestError
from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.core.model.limits import checked_sampling, room_for_output, sampling_of_prompt


def test_checked_parameters_have_a_top_k_within_the_vocabulary_and_each_prompt_its_own_seed() -> None:
    checked = checked_sampling(SamplingParams(top_k=500), vocab_size=100, max_num_seqs=8)
    first, second = (sampling_of_prompt(checked, max_tokens=3) for _ in range(2))
    assert (first.top_k, first.max_tokens) == (100, 3)
    assert first.seed is not None and first.seed != second.seed
    given = SamplingParams(n=8, top_k=5, seed=7)
    checked = checked_sampling(given, vocab_size=100, max_num_seqs=8)
    assert sampling_of_prompt(checked, max_tokens=given.max_tokens) == given


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        (SamplingParams(max_tokens=0), "max_tokens"),
        (SamplingParams(min_tokens=-1), "min_tokens"),
        (SamplingParams(min_tokens=17), "min_tokens"),
    ],
)
def test_lengths_are_those_of_a_prompt(sampling: SamplingParams, field: str) -> None:
    checked = checked_sampling(sampling, vocab_size=5, max_num_seqs=8)
    with pytest.raises(InvalidRequestError) as refused:
        sampling_of_prompt(checked, max_tokens=sampling.max_tokens)
    assert refused.value.field == field


def test_biases_that_were_checked_are_not_copied_for_each_prompt() -> None:
    checked = checked_sampling(SamplingParams(logit_bias={3: 1.0}), vocab_size=5, max_num_seqs=8)
    assert sampling_of_prompt(checked, max_tokens=3).logit_bias is checked.logit_bias


def test_a_prompt_leaves_room_for_one_token_at_least() -> None:
    assert room_for_output(99, 100, field="prompt") == 1


@pytest.mark.parametrize(
    ("check", "field", "message"),
    [
        (lambda: checked_sampling(SamplingParams(n=9), vocab_size=5, max_num_seqs=8), "n", "n is 9, but at most 8 "),
        (lambda: checked_sampling(SamplingParams(top_p=2), vocab_size=5, max_num_seqs=8), "top_p", "top_p must be"),
        (
            lambda: room_for_output(100, 100, field="messages"),
            "messages",
            "This model's maximum context length is 100 tokens, but the prompt has 100 tokens",
        ),
        (
            lambda: room_for_output(8, 7, field="prompts", prompt="prompt 3"),
            "prompts",
            "This model's maximum context length is 7 tokens, but prompt 3 has 8 tokens",
        ),
    ],
)
def test_a_refusal_names_its_field(check: Callable[[], Any], field: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{message}") as refused:
        check()
    assert refused.value.field == field
