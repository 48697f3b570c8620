"""Requests as nodes receive them: what routers should have refused is refused here, too."""

from dataclasses import replace

import pytest

from kvrelay.core.errors import InvalidRequestError
from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.core.rpc.wire import sampling_to_wire
from kvrelay.engine.gpu.sampler import GpuSampler
from kvrelay.engine.request import EngineRequest, KVRole
from kvrelay.engine.sampling.sampler import SamplingRow
from kvrelay.node.engine_request import engine_request_from_wire
from kvrelay.v1 import common_pb2
from kvrelay.v1.decode_node_pb2 import Admit

PROMPT = range(100, 113)


def converted(message: Admit, role: KVRole = KVRole.LOCAL, *, has_store: bool = False) -> EngineRequest:
    return engine_request_from_wire(message, role, vocab_size=1000, max_model_len=64, has_store=has_store)


@pytest.mark.parametrize(
    ("num_prior", "sampling", "field"),
    [
        (13, SamplingParams(max_tokens=30, seed=0), "num_prior_output_tokens"),
        (5, SamplingParams(max_tokens=5, seed=0), "num_prior_output_tokens"),
        (5, SamplingParams(max_tokens=30, n=2, seed=0), "n"),
        (5, SamplingParams(max_tokens=57, seed=0), "max_tokens"),
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
        converted(asked)
    assert refusal.value.field == field


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (Admit(request_id=""), "request_id"),
        (Admit(request_id="a", prompt_token_ids=[7, 1000]), "prompt"),
        (Admit(request_id="a", sampling_params=common_pb2.SamplingParams(temperature=-1.0)), "temperature"),
    ],
)
def test_what_could_harm_other_requests_is_refused_by_field(wrong: Admit, field: str) -> None:
    asked = Admit(request_id="a", prompt_token_ids=[7, 999], sampling_params=sampling_to_wire(SamplingParams(seed=0)))
    assert converted(asked).prompt_token_ids == (7, 999)
    if not wrong.request_id:
        asked.ClearField("request_id")
    asked.MergeFrom(wrong)
    with pytest.raises(InvalidRequestError) as refusal:
        converted(asked)
    assert refusal.value.field == field


@pytest.mark.parametrize("role", [KVRole.LOCAL, KVRole.PRODUCE, KVRole.CONSUME])
def test_what_the_engine_needs_of_a_request_is_taken_over(role: KVRole) -> None:
    """With another salt, one tenant's blocks would be found by another."""
    sampling = SamplingParams(max_tokens=30, seed=0, temperature=0.5)
    asked = Admit(
        request_id="a",
        prompt_token_ids=PROMPT,
        sampling_params=sampling_to_wire(sampling),
        num_prior_output_tokens=3,
        first_choice_index=2,
        priority=-4,
        cache_salt=b"tenant",
        yields_to_decodes=True,
    )
    assert converted(asked, role) == EngineRequest(
        "a",
        tuple(PROMPT[:10]),
        sampling,
        priority=-4,
        cache_salt=b"tenant",
        role=role,
        receive=role is KVRole.CONSUME,
        prior_output_token_ids=tuple(PROMPT[10:]),
        first_choice_index=2,
        yields_to_decodes=True,
    )


def test_a_limit_beyond_the_vocabulary_is_the_vocabulary() -> None:
    """A number that a GPU's sampler does not take would end the engine."""
    sampling = sampling_to_wire(SamplingParams(seed=0, top_k=2**32 - 1))
    asked = Admit(request_id="a", prompt_token_ids=PROMPT, sampling_params=sampling)
    sampling_here = converted(asked).sampling
    assert sampling_here.top_k == 1000
    assert GpuSampler(()).arrays([SamplingRow(sampling_here, 0, 0, 0)])["sampling.top_ks"].tolist() == [1000]


@pytest.mark.parametrize("role", [KVRole.LOCAL, KVRole.PRODUCE])
def test_blocks_are_fetched_where_they_may_be_found_unless_the_whole_prompt_is_computed(role: KVRole) -> None:
    sampling = SamplingParams(seed=0)
    source = common_pb2.BlockSource(source=common_pb2.KVSource(node_id="h", epoch=1, endpoint="at-h"), num_blocks=1)
    for wanted, sources, has_store, receives in (
        (sampling, [], False, False),
        (sampling, [source], False, True),
        (sampling, [], True, True),
        (replace(sampling, prompt_logprobs=0), [source], True, False),
    ):
        asked = Admit(
            request_id="a", prompt_token_ids=PROMPT, sampling_params=sampling_to_wire(wanted), sources=sources
        )
        request = converted(asked, role, has_store=has_store)
        assert request.receive is receives


@pytest.mark.parametrize(("first", "n"), [(2**32 - 1, 2), (127, 2), (128, 1)])
def test_the_outputs_of_a_request_have_indices_below_the_most_that_it_may_have(first: int, n: int) -> None:
    sampling = sampling_to_wire(SamplingParams(n=n, seed=0))
    asked = Admit(request_id="a", prompt_token_ids=PROMPT, sampling_params=sampling, first_choice_index=first)
    with pytest.raises(InvalidRequestError, match="at most 128 outputs") as refusal:
        converted(asked)
    assert refusal.value.field == "first_choice_index"
    asked.first_choice_index = 128 - n
    assert converted(asked).choices.stop == 128
