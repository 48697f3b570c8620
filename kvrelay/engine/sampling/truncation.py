"""Limits the tokens that may be sampled: top-k, then top-p over what top-k left, then min-p.

Invariant: the most likely token always stays, and ties at a boundary go to the lowest token id, so that the result is a
pure function of one row.
"""

import math

import numpy as np
import torch
from torch import Tensor

from kvrelay.core.generation.sampling_params import SamplingParams

EXCLUDED = -80.0
"""The score of a token that may not be sampled, and the lowest score of all. The noise of `random_bits` lies between
-3.2 and 22.9, so no token wins from so far below. Unlike -inf it is not slow to exponentiate, and exp(-80) is still a
normal float32."""

_NUM_BUCKETS = 256
_FEW = 4096  # so many tokens are sorted in less time than it takes to look at a vocabulary several times


def truncate(scores: Tensor, params: SamplingParams) -> Tensor:
    """Returns `scores` with EXCLUDED for every token that may not be sampled, or `scores` itself if there is no limit.

    `scores` is `[vocab_size]` float32: logits after temperature, shifted so that the largest is 0 and none is below
    EXCLUDED. It is not written to.
    """
    top_k = params.top_k if params.top_k < scores.numel() else 0
    if 0 < top_k <= _FEW:
        kept = most_likely(scores, top_k)
        if params.top_p < 1.0:
            weights = scores[kept].exp().to(torch.float64)
            kept = kept[: _num_to_reach(params.top_p * weights.sum(), weights)]
        scores = torch.full_like(scores, EXCLUDED).index_copy_(0, kept, scores[kept])
    else:
        if top_k > 0:
            scores = _largest(scores, top_k)
        if params.top_p < 1.0:
            scores = _nucleus(scores, params.top_p)
    if params.min_p > 0.0:
        scores = torch.where(scores < math.log(params.min_p), EXCLUDED, scores)
    return scores


def most_likely(scores: Tensor, k: int) -> Tensor:
    """Returns the ids of the `k` largest entries of one row (all if there are fewer), largest first, lower ids first
    among equals."""
    if k >= scores.numel():
        return scores.sort(descending=True, stable=True).indices
    largest = scores.topk(k + 1)
    if largest.values[k - 1] > largest.values[k]:
        ids = largest.indices[:k].sort().values
    else:  # `topk` promises nothing about which of several equal entries it returns
        ids = (scores >= largest.values[k]).nonzero().squeeze(-1)
    order = scores[ids].sort(descending=True, stable=True).indices
    return ids[order[:k]]


def _largest(scores: Tensor, k: int) -> Tensor:
    """Keeps the `k` largest scores, those of lower ids among equals, and excludes all others. Nothing is sorted: for
    most of a vocabulary, that would take longer than a step of a small model."""
    smallest = float(np.partition(scores.numpy(), -k)[-k])
    num_larger = int((scores > smallest).sum())
    equal = (scores == smallest).nonzero().squeeze(-1)
    return torch.where(scores < smallest, EXCLUDED, scores).index_fill_(0, equal[k - num_larger :], EXCLUDED)


def _nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Keeps the smallest set of most likely tokens whose probabilities reach `top_p` (Holtzman et al., 2020, section
    3.1), and excludes all others.

    Instead of sorting the vocabulary, it puts tokens into buckets by score, and sorts only the bucket in which the sum
    is reached. Tokens whose probability is below (1 - top_p) / vocab_size are never needed and share the last bucket.
    """
    weights = scores.exp().to(torch.float64)
    total = weights.sum()
    goal = top_p * total
    lowest = max(float(scores.min()), math.log(float(total) * (1.0 - top_p) / scores.numel()))
    scale = (_NUM_BUCKETS - 1) / min(lowest, -1e-3)
    buckets = (scores * scale).clamp_(max=_NUM_BUCKETS - 1).to(torch.int64)
    reached = torch.bincount(buckets, weights, minlength=_NUM_BUCKETS).cumsum(0)
    last = min(int((reached < goal).sum()), int(buckets.max()))
    before = reached[last - 1] if last > 0 else torch.zeros_like(goal)
    members = (buckets == last).nonzero().squeeze(-1)
    members = members[scores[members].sort(descending=True, stable=True).indices]
    num_kept = _num_to_reach(goal - before, weights[members])
    smallest = scores[members[num_kept - 1]]
    return torch.where(scores < smallest, EXCLUDED, scores).index_fill_(0, members[num_kept:], EXCLUDED)


def _num_to_reach(goal: Tensor, weights: Tensor) -> int:
    """Returns how many of `weights`, from the first on, reach `goal` together: at least one, and all of them if
    rounding keeps their sum below it."""
    return min(int((weights.cumsum(0) < goal).sum()) + 1, weights.numel())
