"""What a model allows of a request, up to its ends, and what an error says."""

from collections.abc import Callable
from typing import Any

import pytest

from kvrelay.core.errors import InvalidRequestError
from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.core.model.limits import checked_sampling, room_for_output


def test_checked_parameters_have_a_seed_and_a_top_k_within_the_vocabulary() -> None:
    first, second = (checked_sampling(SamplingParams(top_k=500), vocab_size=100, max_num_seqs=8) for _ in range(2))
    assert first.top_k == 100 and first.seed is not None and first.seed != second.seed
    given = SamplingParams(n=8, top_k=5, seed=7)
    assert checked_sampling(given, vocab_size=100, max_num_seqs=8) == given


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
