"""Whether greedy tokens are right, by a reference that was given them: near ties may end one way or the other."""

from collections.abc import Sequence

import torch

from bench.gpu.case import TOLERANCE, deviation
from kvrelay.core.outputs import TokenLogprobs


def greedy_error(found: Sequence[TokenLogprobs], dtype: torch.dtype) -> float:
    """How far the tokens are from the likeliest, as a share of what is allowed between two computations in `dtype`.
    `found`: the reference's log-probabilities of each and of at least its own likeliest."""
    chosen = torch.tensor([one.logprob for one in found], dtype=torch.float64)
    likeliest = torch.tensor([one.top[0][1] for one in found], dtype=torch.float64)
    return deviation(chosen, likeliest, TOLERANCE[dtype])
