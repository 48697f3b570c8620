"""What SamplingParams accepts from a caller in Python: types, ranges, and numbers of entries."""

import math
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from kvrelay import SamplingParams
from kvrelay.core.errors import InvalidRequestError
from kvrelay.core.generation.sampling_params import (
    MAX_LOGPROBS,
    MAX_N,
    MAX_SEED,
    MAX_STOP_STRING_LENGTH,
    MAX_STOP_STRINGS,
    MAX_TOKEN_ENTRIES,
    MIN_SEED,
)


def test_one_stop_string_is_not_taken_apart() -> None:
    sampling = SamplingParams(stop="Paris")
    assert sampling.stop == ("Paris",)
    sampling.validate(vocab_size=100)


def test_sequences_and_mappings_become_tuples() -> None:
    sampling = SamplingParams(stop=["a", "b"], stop_token_ids=[3, 4], logit_bias={5: 1.5, 6: -2})
    sampling.validate(vocab_size=100)
    assert sampling == SamplingParams(stop=("a", "b"), stop_token_ids=(3, 4), logit_bias=((5, 1.5), (6, -2)))
    assert hash(sampling) == hash(
        SamplingParams(stop=("a", "b"), stop_token_ids=(3, 4), logit_bias=[(5, 1.5), (6, -2)])
    )
    assert sampling.biases == ((5, 1.5), (6, -2))


def test_a_seed_and_a_top_k_that_is_off_have_one_form() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    assert SamplingParams(seed=-7) == SamplingParams(seed=np.int64(-7)) == SamplingParams(seed=2**64 - 7)  # type: ignore[arg-type]
    assert SamplingParams(seed=MIN_SEED).seed == 2**63


@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
)
@pytest.mark.parametrize("number", [Fraction(1, 2), np.float16(0.5), np.float32(0.5), np.float64(0.5)], ids=repr)
def test_numbers_of_other_types_become_floats(field: str, number: Any) -> None:
    given: dict[str, Any] = {field: number}
    sampling = SamplingParams(**given)
    sampling.validate(vocab_size=100)
    assert type(getattr(sampling, field)) is float and getattr(sampling, field) == 0.5


@pytest.mark.parametrize("field", ["n", "max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("number", [np.uint8(9), np.int32(9), np.uint64(9)], ids=repr)
def test_integers_of_other_types_become_pythons_own(field: str, number: Any) -> None:
    given: dict[str, Any] = {field: number}
    sampling = SamplingParams(**given)
    sampling.validate(vocab_size=100)
    assert type(getattr(sampling, field)) is int and getattr(sampling, field) == 9


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", None),
        ("max_tokens", 2.5),
        ("n", "2"),
        ("top_k", None),
        ("seed", 1.5),
        ("logprobs", "all"),
        ("logprobs", True),
        ("n", True),
        ("temperature", False),
        ("temperature", None),
        ("temperature", Decimal("0.5")),
        ("temperature", Fraction(10**400)),
        ("repetition_penalty", Fraction(10**400)),
        ("n", np.float64(2.0)),
        ("top_p", "0.9"),
        ("repetition_penalty", None),
        ("stop", [1, 2]),
        ("stop", 5),
        ("stop_token_ids", 5),
        ("stop_token_ids", ["5"]),
        ("logit_bias", 5),
        ("logit_bias", [5]),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", {5: None}),
        ("stop_token_ids", [3, True, 4]),
        ("logit_bias", [(3, 1.0), (4, 1.0, 2.0), (5, 1.0)]),
        ("logit_bias", {3: 1.0, "4": 1.0, 5: 1.0}),
        ("logit_bias", {3: 1.0, 4: False, 5: 1.0}),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_the_name_of_its_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"{field} must be") as refused:
        SamplingParams(**{field: value}).validate(vocab_size=100)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("field", "values", "beyond"),
    [
        ("n", (1, MAX_N), (0, MAX_N + 1)),
        ("max_tokens", (1, 10**9), (0, -1)),
        ("min_tokens", (0, 16), (-1, 17)),
        ("temperature", (0.0, 100.0), (-0.1, 100.1)),
        ("top_k", (-1, 10**9), (-2,)),
        ("top_p", (0.001, 1.0), (0.0, 1.001)),
        ("min_p", (0.0, 1.0), (-0.001, 1.001)),
        ("repetition_penalty", (0.001, 1e300), (0.0, math.inf, math.nan)),
        ("presence_penalty", (-2.0, 2.0), (-2.001, 2.001)),
        ("frequency_penalty", (-2.0, 2.0), (-2.001, 2.001)),
        ("logit_bias", ({99: 100.0}, {0: -100.0}), ({100: 1.0}, {-1: 1.0}, {5: 100.1}, {5: -100.1})),
        (
            "logit_bias",
            ({3: 1.0, 0: 2, 99: 0.5},),
            ({3: 1, 100: 1, 4: 1}, {3: 1, -1: 1, 4: 1}, {3: 1, 4: math.nan, 5: 1}, [(3, 1.0), (4, 1.0), (3, 1.0)]),
        ),
        ("stop_token_ids", ([0, 99],), ([100], [-1], [3, 100, 4], [3, -1, 4])),
        ("stop", ("a", "a" * MAX_STOP_STRING_LENGTH), ("", "a" * (MAX_STOP_STRING_LENGTH + 1))),
        ("seed", (MIN_SEED, MAX_SEED), (MIN_SEED - 1, MAX_SEED + 1)),
        ("logprobs", (0, MAX_LOGPROBS), (-1, MAX_LOGPROBS + 1)),
        ("prompt_logprobs", (0, MAX_LOGPROBS), (-1, MAX_LOGPROBS + 1)),
    ],
)
def test_the_ends_of_a_range_are_taken_and_what_is_beyond_them_is_refused(
    field: str, values: Sequence[Any], beyond: Sequence[Any]
) -> None:
    for value in values:
        SamplingParams(**{field: value}).validate(vocab_size=100)
    for value in beyond:
        with pytest.raises(InvalidRequestError) as refused:
            SamplingParams(**{field: value}).validate(vocab_size=100)
        assert refused.value.field == field


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_no_more_log_probabilities_are_asked_for_than_there_are_tokens(field: str) -> None:
    values: dict[str, Any] = {field: 5}
    SamplingParams(**values).validate(vocab_size=5)
    with pytest.raises(InvalidRequestError, match=field):
        SamplingParams(**values).validate(vocab_size=4)


@pytest.mark.parametrize("field", ["n", "temperature", "repetition_penalty", "seed", "logprobs", "prompt_logprobs"])
def test_an_integer_beyond_all_floats_is_refused_by_the_name_of_its_field(field: str) -> None:
    values: dict[str, Any] = {field: 10**400}
    with pytest.raises(InvalidRequestError, match=f"{field} must be") as refused:
        SamplingParams(**values).validate(vocab_size=100)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("field", "entry", "most"),
    [
        ("stop", str, MAX_STOP_STRINGS),
        ("stop_token_ids", int, MAX_TOKEN_ENTRIES),
        ("logit_bias", lambda number: (number, 1.0), MAX_TOKEN_ENTRIES),
    ],
)
def test_entries_past_the_limit_are_never_looked_at(field: str, entry: Callable[[int], object], most: int) -> None:
    def entries(num_entries: int) -> Iterator[object]:
        yield from map(entry, range(num_entries))
        raise AssertionError("the limit was passed before")

    given: dict[str, Any] = {field: list(map(entry, range(most)))}
    SamplingParams(**given).validate(vocab_size=most)
    given[field] = entries(most + 1)
    with pytest.raises(InvalidRequestError, match=f"{field} has more than the {most} entries") as refused:
        SamplingParams(**given)
    assert refused.value.field == field
