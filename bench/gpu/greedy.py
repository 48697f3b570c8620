"""Checks greedy tokens with a reference that computes their probabilities: near ties may end one way or the other."""

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
