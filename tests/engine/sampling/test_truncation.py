"""Top-k, top-p and min-p keep the tokens that the reference keeps."""

import math
import random

import pytest
import torch

from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.engine.sampling.truncation import EXCLUDED, most_likely, truncate
from tests.engine.sampling.reference import VOCAB_SIZE, make_logits, probabilities_of


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 4.0])
def test_limits_keep_the_reference_set(spread: float, ties: bool) -> None:
    rng = random.Random(7)
    for trial in range(40):
        logits = make_logits(trial, ties=ties)[0] * spread
        params = SamplingParams(
            top_k=rng.choice((0, 0, 1, 7, 120, VOCAB_SIZE)),
            top_p=rng.choice((1.0, 0.999, 0.95, 0.6, 0.05)),
            min_p=rng.choice((0.0, 0.0, 0.05, 0.5)),
        )
        scores = (logits - logits.max()).clamp(min=EXCLUDED)
        kept = (truncate(scores, params) > EXCLUDED).tolist()
        probabilities = probabilities_of(scores.to(torch.float64).tolist(), params)
        assert kept == [probability > 0 for probability in probabilities], params


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_limits_keep_the_reference_set_of_most_of_a_large_vocabulary(top_p: float, ties: bool) -> None:
    logits = make_logits(3, vocab_size=6000, ties=ties)[0] * 0.2  # so flat that thousands of tokens reach `top_p`
    scores = logits - logits.max()
    for top_k in (4096, 4097, 5999):
        params = SamplingParams(top_k=top_k, top_p=top_p)
        kept = (truncate(scores, params) > EXCLUDED).tolist()
        probabilities = probabilities_of(scores.to(torch.float64).tolist(), params)
        assert kept == [probability > 0 for probability in probabilities], params


def test_nucleus_at_exact_boundaries() -> None:
    scores = torch.tensor([0.5, 0.25, 0.125, 0.125]).log() - math.log(0.5)
    for top_p, num_kept in ((0.01, 1), (0.49, 1), (0.51, 2), (0.74, 2), (0.76, 3), (0.9, 4), (1.0, 4)):
        kept = (truncate(scores, SamplingParams(top_p=top_p)) > EXCLUDED).tolist()
        assert kept == [True] * num_kept + [False] * (4 - num_kept), top_p
    equal = torch.zeros(8)
    assert (truncate(equal, SamplingParams(top_p=0.5)) > EXCLUDED).tolist() == [True] * 4 + [False] * 4
    almost_one = truncate(equal, SamplingParams(top_p=math.nextafter(1.0, 0.0)))
    assert (almost_one > EXCLUDED).all()
    close = torch.tensor([0.0, -0.005, -0.005, -0.005, -10.0])  # the three are in the bucket next to that of the first
    assert (truncate(close, SamplingParams(top_p=0.5)) > EXCLUDED).tolist() == [True, True, False, False, False]


def test_a_goal_that_rounding_puts_out_of_reach_is_met_by_all_tokens() -> None:
    for logits in 2.0 * make_logits(5, 100, vocab_size=2000):
        scores = logits - logits.max()
        truncated = truncate(scores, SamplingParams(top_p=math.nextafter(1.0, 0.0)))
        assert (truncated[scores > -25.0] > EXCLUDED).all()


def test_most_likely_breaks_ties_by_id() -> None:
    scores = torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0, 2.0])
    expected = [1, 3, 2, 4, 5, 0]
    for k in range(1, 9):
        assert most_likely(scores, k).tolist() == expected[:k]
    assert most_likely(torch.zeros(5000), 3).tolist() == [0, 1, 2]
