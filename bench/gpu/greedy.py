"""Checks the likeliest tokens with a reference that computes their probabilities: near ties may end one way or the
other."""

from collections.abc import Sequence

import torch

from bench.gpu.case import TOLERANCE, deviation
from kvrelay.core.generation.outputs import TokenLogprobs


def greedy_error(found: Sequence[TokenLogprobs], dtype: torch.dtype) -> float:
    """Returns how far the tokens are from the likeliest, as a share of what is allowed between two computations in
    `dtype`. `found` has the reference's log-probabilities of each token and at least of its own likeliest one."""
    chosen = torch.tensor([one.logprob for one in found], dtype=torch.float64)
    likeliest = torch.tensor([one.top[0][1] for one in found], dtype=torch.float64)
    return deviation(chosen, likeliest, TOLERANCE[dtype])


def likeliest_error(found: Sequence[TokenLogprobs], expected: Sequence[TokenLogprobs], dtype: torch.dtype) -> float:
    """Returns how far the log-probabilities of the likeliest tokens are from the reference's, as a share of what is
    allowed between two computations in `dtype`. A token that only one of the two names counts as the least likely of
    the other's: it is no likelier there."""
    pairs = []
    for one, other in zip(found, expected, strict=True):
        ours, theirs = dict(one.top), dict(other.top)
        least, least_of_theirs = min(ours.values()), min(theirs.values())
        pairs += [(ours.get(token, least), theirs.get(token, least_of_theirs)) for token in ours.keys() | theirs.keys()]
    actual, exact = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    return deviation(actual, exact, TOLERANCE[dtype])
