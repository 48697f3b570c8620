"""Requests as nodes receive them: what routers should have refused is refused here, too."""

import pytest

from kvrelay.core.errors import InvalidRequestError
from kvrelay.core.sampling_params import SamplingParams
from kvrelay.core.wire import sampling_to_wire
from kvrelay.engine.request import KVRole
from kvrelay.node.convert import engine_request_from_wire
from kvrelay.v1.decode_node_pb2 import Admit

PROMPT = range(100, 113)


@pytest.mark.parametrize(
    ("num_prior", "sampling", "field"),
    [
        (13, SamplingParams(max_tokens=30, seed=0), "num_prior_output_tokens"),
        (5, SamplingParams(max_tokens=5, seed=0), "num_prior_output_tokens"),
        (5, SamplingParams(max_tokens=30, n=2, seed=0), "n"),
    ],
)
def test_prior_output_that_contradicts_its_request_is_refused_by_field(
    num_prior: int, sampling: SamplingParams, field: str
) -> None:
    asked = Admit(
        request_id="a",
        prompt_token_ids=PROMPT,
        sampling_params=sampling_to_wire(sampling),
        num_prior_output_tokens=num_prior,
    )
    with pytest.raises(InvalidRequestError) as refusal:
        engine_request_from_wire(asked, KVRole.LOCAL, vocab_size=1000, has_store=False)
    assert refusal.value.field == field


@pytest.mark.parametrize(("first", "n"), [(2**32 - 1, 2), (127, 2), (128, 1)])
def test_the_outputs_of_a_request_have_indices_below_the_most_that_it_may_have(first: int, n: int) -> None:
    sampling = sampling_to_wire(SamplingParams(n=n, seed=0))
    asked = Admit(request_id="a", prompt_token_ids=PROMPT, sampling_params=sampling, first_choice_index=first)
    with pytest.raises(InvalidRequestError, match="at most 128 outputs") as refusal:
        engine_request_from_wire(asked, KVRole.LOCAL, vocab_size=1000, has_store=False)
    assert refusal.value.field == "first_choice_index"
    asked.first_choice_index = 128 - n
    assert engine_request_from_wire(asked, KVRole.LOCAL, vocab_size=1000, has_store=False).choices.stop == 128
