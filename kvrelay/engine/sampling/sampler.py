"""Samples tokens from logits. The same row gives the same token, whatever else is in the batch.

Order of operations for one row:

1. log-probabilities, if asked for, from the unmodified logits
2. logit bias, `min_tokens`, repetition, presence and frequency penalties (`penalties.py`)
3. a greedy row takes the largest logit, among equals the one of the lowest id, and ends here
4. temperature
5. top-k, top-p, min-p (`truncation.py`)
6. a random choice by counter-based Gumbel noise (`random_bits.py`): the Gumbel-max trick, Maddison et al. (2014),
   "A* sampling", section 2

Step 6 draws in two levels. Tokens are grouped by id; the log of a group's total weight plus Gumbel noise decides the
group, and the tokens' scores plus independent noise decide within it. This is exact, because the probability of a token
is that of its group times its probability within the group, and needs noise for a small part of the vocabulary only.
Invariant: float32 is computed row by row; only integers and float64 noise are computed across rows.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvrelay.core.outputs import TokenLogprobs
from kvrelay.core.prompt_logprobs import PromptLogprobs
from kvrelay.core.record import record
from kvrelay.core.sampling_params import SamplingParams
from kvrelay.engine.sampling.fixed_edits import NO_EDITS, FixedEdits
from kvrelay.engine.sampling.penalties import adjust, changes_logits
from kvrelay.engine.sampling.random_bits import Draw, Stream, gumbel, uniform
from kvrelay.engine.sampling.seen_tokens import SeenTokens
from kvrelay.engine.sampling.truncation import EXCLUDED, most_likely, truncate

PROMPT_LOGPROB_ROWS = 128  # rows computed at a time, since a row of logits is as long as the vocabulary
_GROUP_SIZE = 128  # in tokens; with another size the same seed gives other tokens
NO_TOKEN = -1
_MIN_TEMPERATURE = 1e-5  # below this every score but the largest is EXCLUDED anyway


@record
class SamplingRow:
    """What to sample from one row of logits.

    `position` is the index of the new token in its sequence, prompt included. `num_output_tokens` were sampled before
    it. `seen` is that of `seen_tokens`. It belongs to the sequence, which adds nothing to it before this row is
    sampled. `fixed` is that of `fixed_edits`.
    """

    params: SamplingParams
    choice_index: int
    position: int
    num_output_tokens: int
    seen: SeenTokens | None = None
    fixed: FixedEdits = NO_EDITS


@record
class SampledToken:
    """A sampled token, `NO_TOKEN` if the largest logit of its row is not finite. `logprobs` is None unless the request
    asked for them."""

    token_id: int
    logprobs: TokenLogprobs | None


class Sampler:
    """The sampler for logits on the CPU. It has no state; any thread may call it."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self._num_groups = -(-vocab_size // _GROUP_SIZE)

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        """Returns one token per row. `logits` is `[len(rows), vocab_size]` float32 on the CPU and is not written to.

        A row with a NaN, an infinity or nothing to choose from gets `NO_TOKEN`, since the model's output cannot be
        trusted then.
        """
        token_ids = _largest(logits)
        drawn = []
        scores = []
        for index, row in enumerate(rows):
            changed = changes_logits(row.params, row.num_output_tokens)
            if token_ids[index] == NO_TOKEN or (row.params.greedy and not changed):
                continue
            row_logits = self._adjusted(logits[index], row) if changed else logits[index]
            if row.params.greedy:
                token_ids[index] = int(row_logits.max(dim=-1).indices)
                continue
            drawn.append(index)
            scores.append(_scores(row_logits, row.params))
        if drawn:
            for index, token_id in zip(drawn, self._draw(scores, [_draw_of(rows[i]) for i in drawn]), strict=True):
                token_ids[index] = token_id
        return [
            SampledToken(token_id, None if token_id == NO_TOKEN else logprobs_of(row, logits[index], token_id))
            for index, (row, token_id) in enumerate(zip(rows, token_ids, strict=True))
        ]

    def _adjusted(self, row_logits: Tensor, row: SamplingRow) -> Tensor:
        return adjust(
            row_logits,
            row.params,
            eos_token_ids=self.eos_token_ids,
            num_output_tokens=row.num_output_tokens,
            seen=row.seen,
            fixed=row.fixed,
        )

    def _draw(self, scores: Sequence[Tensor], draws: Sequence[Draw]) -> list[int]:
        """Draws one token id for each row of scores, in proportion to exp(score). A row is `[vocab_size]`, its largest
        score is 0."""
        padding = self._num_groups * _GROUP_SIZE - self.vocab_size
        padded = [torch.nn.functional.pad(row, (0, padding), value=EXCLUDED) if padding else row for row in scores]
        grouped = [row.view(self._num_groups, _GROUP_SIZE) for row in padded]
        totals = torch.stack([row.exp().sum(dim=-1) for row in grouped]).to(torch.float64)  # [num_draws, num_groups]
        first = torch.zeros(len(draws), dtype=torch.int64)
        noise = gumbel(uniform(draws, Stream.TOKEN_GROUP, first, self._num_groups))
        groups = (totals.log() + noise).max(dim=-1).indices  # [num_draws]
        members = torch.stack([row[group] for row, group in zip(grouped, groups.tolist(), strict=True)])
        first = groups * _GROUP_SIZE
        noise = gumbel(uniform(draws, Stream.TOKEN, first, _GROUP_SIZE))
        token_ids: list[int] = (first + (members + noise).max(dim=-1).indices).tolist()
        return token_ids


def _largest(logits: Tensor) -> list[int]:
    """Returns the id of each row's largest logit, the lowest id among equals; `NO_TOKEN` for a row whose largest logit
    is not finite."""
    rows = logits.numpy()  # numpy's argmax takes a twentieth of the time of torch's
    token_ids: list[int] = rows.argmax(axis=-1).tolist()  # in a row with a NaN, the index of that NaN
    return [at if math.isfinite(rows[row, at]) else NO_TOKEN for row, at in enumerate(token_ids)]


def prompt_logprobs(logits: Tensor, target_ids: Sequence[int], k: int) -> PromptLogprobs:
    """Returns the log-probability of `target_ids[i]` in row i of `logits`, `[n, vocab_size]` float32, with the `k` most
    likely tokens of that row."""
    rows = zip(logits, target_ids, strict=True)
    return PromptLogprobs.of(_token_logprobs(row, token_id, k) for row, token_id in rows)


def _scores(logits: Tensor, params: SamplingParams) -> Tensor:
    """Applies temperature and limits. The largest score is 0, so that no temperature overflows; none is below
    EXCLUDED."""
    scores = logits - logits.max()
    if params.temperature != 1.0:
        scores /= max(params.temperature, _MIN_TEMPERATURE)
    return truncate(scores.clamp_(min=EXCLUDED), params)


def _draw_of(row: SamplingRow) -> Draw:
    seed = row.params.seed
    assert seed is not None, "whoever hands in a request that has no seed draws one"
    return Draw(seed, row.choice_index, row.position)


def logprobs_of(row: SamplingRow, logits: Tensor, token_id: int) -> TokenLogprobs | None:
    """Returns the log-probabilities that the row asks for, from its unmodified `logits`, `[vocab_size]`."""
    if row.params.logprobs is None:
        return None
    return _token_logprobs(logits, token_id, row.params.logprobs)


def _token_logprobs(logits: Tensor, token_id: int, k: int) -> TokenLogprobs:
    """Returns the log-probabilities of one row, `[vocab_size]`. Tokens as likely as the given one do not count against
    its rank."""
    logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
    chosen = logprobs[token_id]
    top: tuple[tuple[int, float], ...] = ()
    if k > 0:
        ids = most_likely(logits, k)
        top = tuple(zip(ids.tolist(), logprobs[ids].tolist(), strict=True))
    return TokenLogprobs(token_id, float(chosen), int((logits > logits[token_id]).sum()) + 1, top)
