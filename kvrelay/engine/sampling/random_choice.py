"""A random token for each row of logits: temperature, top-k, top-p and min-p, then a draw without state.

The draw adds counter-based Gumbel noise (`random_bits.py`) and takes the largest score: the Gumbel-max trick, Maddison
et al. (2014), "A* sampling", section 2. It draws in two levels. Tokens are grouped by id; the log of a group's total
weight plus noise decides the group, and the tokens' scores plus independent noise decide within it. This is exact,
because the probability of a token is that of its group times its probability within the group, and needs noise for a
small part of the vocabulary only.

Invariant: a row gives the same token beside any other rows. The compiled kernels and torch give the same token unless
the noisy scores of two tokens are closer than the rounding of float32.
"""

from collections.abc import Sequence

import torch
from paged_kernels.cpu.extension import load_extension
from paged_kernels.cpu.threads import num_threads
from torch import Tensor

from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.engine.sampling.random_bits import Draw, Stream, gumbel, uniform
from kvrelay.engine.sampling.truncation import EXCLUDED, truncate

_GROUP_SIZE = 128  # in tokens; with another size the same seed gives other tokens


def choose(rows: Sequence[Tensor], params: Sequence[SamplingParams], draws: Sequence[Draw]) -> list[int]:
    """Returns a token id for each row of logits, `[vocab_size]` float32 on the CPU, of which none is a NaN and the
    largest is finite. No row is written to, and none of `params` is greedy."""
    native = load_extension()
    if native is None:
        return choose_in_torch(rows, params, draws)
    return native.sample_tokens(
        list(rows),
        [one.temperature for one in params],
        [one.top_k for one in params],
        [one.top_p for one in params],
        [one.min_p for one in params],
        [draw.seed for draw in draws],
        [draw.position for draw in draws],
        [draw.choice_index for draw in draws],
        num_threads(),
    )


def choose_in_torch(rows: Sequence[Tensor], params: Sequence[SamplingParams], draws: Sequence[Draw]) -> list[int]:
    """Does what `choose` does, without compiled kernels. Tests compare the kernels with it.

    float32 is computed row by row; only integers and float64 noise are computed across rows.
    """
    grouped = [_in_groups(_scores(row, one)) for row, one in zip(rows, params, strict=True)]
    totals = torch.stack([row.exp().sum(dim=-1) for row in grouped]).to(torch.float64)  # [num_rows, num_groups]
    first = torch.zeros(len(draws), dtype=torch.int64)
    noise = gumbel(uniform(draws, Stream.TOKEN_GROUP, first, totals.shape[1]))
    groups = (totals.log() + noise).max(dim=-1).indices  # [num_rows]
    members = torch.stack([row[group] for row, group in zip(grouped, groups.tolist(), strict=True)])
    first = groups * _GROUP_SIZE
    noise = gumbel(uniform(draws, Stream.TOKEN, first, _GROUP_SIZE))
    token_ids: list[int] = (first + (members + noise).max(dim=-1).indices).tolist()
    return token_ids


def _scores(logits: Tensor, params: SamplingParams) -> Tensor:
    """Applies temperature and limits. The largest score is 0, so that no temperature overflows; none is below
    EXCLUDED."""
    scores = logits - logits.max()
    if params.temperature != 1.0:
        scores /= params.temperature
    return truncate(scores.clamp_(min=EXCLUDED), params)


def _in_groups(scores: Tensor) -> Tensor:
    """Returns `[num_groups, _GROUP_SIZE]`, filled up with EXCLUDED."""
    padding = -len(scores) % _GROUP_SIZE
    padded = torch.nn.functional.pad(scores, (0, padding), value=EXCLUDED) if padding else scores
    return padded.view(-1, _GROUP_SIZE)
