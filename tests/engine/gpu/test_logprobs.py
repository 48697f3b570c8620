"""Log-probabilities computed on the GPU equal those that the host computes row by row."""

import math

import pytest
import torch

from kvrelay.engine.gpu.logprobs import launch_logprobs
from kvrelay.engine.plan import SequenceResult
from kvrelay.engine.sampling.logprobs import token_logprobs, token_logprobs_in_torch


@pytest.mark.parametrize("k", [0, 1, 4])
def test_log_probabilities_equal_those_of_the_host(k: int) -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(3))
    logits[1, 10:20] = 3.0  # equals
    logits[2, 5:] = -torch.inf
    logits[3] = -logits[3].abs()
    logits[3, 30:34] = torch.tensor([0.0, -0.0, 0.0, -0.0])
    targets = [4, 15, 2, 49, 0]
    expected = token_logprobs(list(logits), targets, k)
    launched = launch_logprobs(logits, torch.tensor(targets), [k] * 5)
    found = launched.collect()
    assert list(launched.columns()) == found
    for one, other in zip(found, expected, strict=True):
        assert (one.token_id, one.rank) == (other.token_id, other.rank)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert [top for top, _ in one.top] == [top for top, _ in other.top]
        assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top], abs=1e-5)


def test_each_row_gets_as_many_top_tokens_as_it_asked_for() -> None:
    found = launch_logprobs(torch.randn(3, 20), torch.tensor([1, 2, 3]), [0, 5, 2]).collect()
    assert [len(one.top) for one in found] == [0, 5, 2]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_no_token_of_a_row_that_is_not_finite_has_a_log_probability(value: float) -> None:
    """By this the engine knows such a row, also one from which it samples nothing."""
    logits = torch.randn(2, 20)
    logits[1, 7] = value
    on_gpu = launch_logprobs(logits, torch.tensor([3, 3]), [2, 2]).columns()
    for found in (on_gpu, *(compute(list(logits), [3, 3], 2) for compute in (token_logprobs, token_logprobs_in_torch))):
        assert [math.isnan(logprob) for logprob in found.logprobs] == [False, True]
        assert [math.isnan(logprob) for logprob in found.top_logprobs] == [False, False, True, True]
        assert not SequenceResult((), found).is_finite
