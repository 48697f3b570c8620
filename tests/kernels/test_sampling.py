"""Compiled sampling on every instruction set: the tokens and log-probabilities that torch's operations give."""

import math
import random
from collections.abc import Callable

import pytest
import torch
from paged_kernels import _native
from torch import Tensor

from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.engine.sampling.logprobs import token_logprobs, token_logprobs_in_torch
from kvrelay.engine.sampling.random_bits import Draw
from kvrelay.engine.sampling.random_choice import choose, choose_in_torch

pytestmark = pytest.mark.usefixtures("instruction_set", "num_threads")

# Less than a group of 128, whole groups, whole groups and a part; of many more groups than top_k may have.
VOCAB_SIZES = (1, 2, 50, 128, 300, 2560, 30_000)
ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "spread": lambda normal: 2.0 * normal,
    "flat": lambda normal: 0.05 * normal,
    "peaked": lambda normal: torch.where(normal > 2.5, 15.0 + normal, normal),
    "ties": lambda normal: (2.0 * normal).round() / 2.0,
    "equal": lambda normal: torch.full_like(normal, -3.0),
    "zeros": lambda normal: 0.0 * normal,  # of both signs
    "excluded": lambda normal: torch.where(normal > 0.5, normal, -math.inf),
}


def make_rows(kind: str, vocab_size: int, count: int) -> list[Tensor]:
    rows = ROWS[kind](torch.randn(count, vocab_size))
    if kind == "excluded":
        rows[:, vocab_size // 2] = 1.0  # one is not
    return list(rows)


def random_params(rng: random.Random, vocab_size: int) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice((1e-6, 0.3, 1.0, 1.0, 1.7)),
        top_k=rng.choice((0, 0, 0, 1, 2, 20, vocab_size // 2, vocab_size - 1, vocab_size, 10**6)),
        top_p=rng.choice((1.0, 1.0, 0.95, 0.8, 0.3, 1e-6, math.nextafter(1.0, 0.0))),
        min_p=rng.choice((0.0, 0.0, 0.0, 0.01, 0.2, 1.0)),
    )


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_tokens_are_those_of_torch(vocab_size: int) -> None:
    rng = random.Random(vocab_size)
    for kind in ROWS:
        rows = make_rows(kind, vocab_size, 100)
        params = [random_params(rng, vocab_size) for _ in rows]
        draws = [Draw(rng.getrandbits(64), rng.choice((0, 1, 127)), rng.randrange(2**17)) for _ in rows]
        assert choose(rows, params, draws) == choose_in_torch(rows, params, draws), kind


def test_every_number_of_a_draw_is_that_of_torch() -> None:
    """All tokens are as likely, so that the noise alone decides."""
    rows = [torch.zeros(20_000)] * 400
    params = [SamplingParams()] * 400
    draws = [Draw(2**64 - 1 - index, 2**32 - 1, 2**32 - 1 - index) for index in range(400)]
    assert choose(rows, params, draws) == choose_in_torch(rows, params, draws)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("k", [0, 1, 20])
def test_log_probabilities_are_exact_and_their_order_is_that_of_torch(vocab_size: int, k: int) -> None:
    for kind in ROWS:
        rows = make_rows(kind, vocab_size, 20)
        token_ids = [int(row.argmax()) if index % 2 else index * 7919 % vocab_size for index, row in enumerate(rows)]
        found, expected = token_logprobs(rows, token_ids, k), token_logprobs_in_torch(rows, token_ids, k)
        assert found.ranks == expected.ranks, kind
        assert found.top_token_ids == expected.top_token_ids, kind
        for row, token_id, entry in zip(rows, token_ids, found, strict=True):
            ids = [token_id, *(top for top, _ in entry.top)]
            exact = row.double().log_softmax(dim=-1)[ids].tolist()
            assert [entry.logprob, *(logprob for _, logprob in entry.top)] == pytest.approx(exact, abs=3e-6), kind


def test_logits_far_below_the_largest_are_in_their_own_order() -> None:
    """Their distances from the largest are equal once they are rounded."""
    row = torch.zeros(300)
    row[7] = 1e9
    row[100], row[50] = 2.0, 1.0
    found = token_logprobs([row], [50], 4)
    assert found.top_token_ids.tolist() == [7, 100, 50, 0]
    assert found.ranks.tolist() == [3]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", [slice(0, 1), slice(131, 132), slice(100, 300)], ids=["first", "inner", "most"])
def test_logits_that_are_not_finite_have_no_log_probabilities_and_do_no_harm(value: float, where: slice) -> None:
    row = torch.randn(300)
    row[where] = value
    found = token_logprobs([row, torch.full((300,), -math.inf)], [5, 6], 3)
    assert all(math.isnan(one) for one in [*found.logprobs, *found.top_logprobs])
    for params in (SamplingParams(), SamplingParams(top_k=200), SamplingParams(top_k=2, top_p=0.5, min_p=0.1)):
        [token_id] = choose([row], [params], [Draw(1, 0, 0)])
        assert 0 <= token_id < 300


def sample(
    logits: list[Tensor], *, temperatures: list[float] | None = None, seeds: list[int] | None = None
) -> list[int]:
    ones = [1] * len(logits)
    no_limit = [1.0] * len(logits)
    return _native.sample_tokens(
        logits, temperatures or no_limit, [0] * len(logits), no_limit, [0.0] * len(logits), seeds or ones, ones, ones, 1
    )


def test_arguments_that_do_not_fit_are_refused() -> None:
    row = torch.zeros(10)
    assert len(sample([row])) == 1
    assert sample([]) == []
    for logits, message in (
        ([row.double()], "not float32, bfloat16 or float16"),
        ([row.half()], "a row of logits is not float32"),
        ([torch.zeros(20)[::2]], "not contiguous"),
        ([torch.zeros(2, 5)], "2 dimensions"),
        ([row, torch.zeros(9)], "rows of logits differ in length"),
        ([torch.zeros(0)], "a row of logits is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            sample(logits)
        with pytest.raises(ValueError, match=message):
            _native.token_logprobs(logits, [0] * len(logits), 0, 1)
    with pytest.raises(ValueError, match="every parameter needs an entry for each row"):
        sample([row], seeds=[1, 2])
    for temperature in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="a temperature must be above 0"):
            sample([row], temperatures=[temperature])
    for token_ids in ([-1], [10]):
        with pytest.raises(ValueError, match="a token is outside the vocabulary"):
            _native.token_logprobs([row], token_ids, 0, 1)
    with pytest.raises(ValueError, match="every row needs a token"):
        _native.token_logprobs([row], [], 0, 1)
    for num_top in (-1, 11):
        with pytest.raises(ValueError, match="num_top is not within the vocabulary"):
            _native.token_logprobs([row], [0], num_top, 1)
