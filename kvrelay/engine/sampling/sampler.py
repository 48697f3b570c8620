"""Samples tokens from logits. The same row gives the same token, whatever else is in the batch.

Order of operations for one row:

1. log-probabilities, if asked for, from the unmodified logits (`logprobs.py`)
2. logit bias, `min_tokens`, repetition, presence and frequency penalties (`penalties.py`)
3. a greedy row takes the largest logit, among equals the one of the lowest id, and ends here
4. temperature, top-k, top-p, min-p and a random choice (`random_choice.py`)
"""

import math
from collections.abc import Sequence

from torch import Tensor

from kvrelay.core.outputs import TokenLogprobs
from kvrelay.core.record import record
from kvrelay.core.sampling_params import SamplingParams
from kvrelay.engine.sampling.fixed_edits import NO_EDITS, FixedEdits
from kvrelay.engine.sampling.logprobs import token_logprobs
from kvrelay.engine.sampling.penalties import adjust, changes_logits
from kvrelay.engine.sampling.random_bits import Draw
from kvrelay.engine.sampling.random_choice import choose
from kvrelay.engine.sampling.seen_tokens import SeenTokens

NO_TOKEN = -1


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

    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        self.eos_token_ids = tuple(eos_token_ids)

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        """Returns one token per row. `logits` is `[len(rows), vocab_size]` float32 on the CPU and is not written to.

        A row with a NaN, an infinity or nothing to choose from gets `NO_TOKEN`, since the model's output cannot be
        trusted then.
        """
        token_ids = _largest(logits)
        drawn: dict[int, Tensor] = {}  # adjusted logits by row
        for index, row in enumerate(rows):
            changed = changes_logits(row.params, row.num_output_tokens)
            if token_ids[index] == NO_TOKEN or (row.params.greedy and not changed):
                continue
            row_logits = self._adjusted(logits[index], row) if changed else logits[index]
            if row.params.greedy:
                token_ids[index] = int(row_logits.numpy().argmax())
            else:
                drawn[index] = row_logits
        if drawn:
            wanted = [rows[index] for index in drawn]
            chosen = choose([*drawn.values()], [row.params for row in wanted], [_draw_of(row) for row in wanted])
            for index, token_id in zip(drawn, chosen, strict=True):
                token_ids[index] = token_id
        logprobs = _logprobs(logits, rows, token_ids)
        return [SampledToken(token_id, logprobs.get(index)) for index, token_id in enumerate(token_ids)]

    def _adjusted(self, row_logits: Tensor, row: SamplingRow) -> Tensor:
        return adjust(
            row_logits,
            row.params,
            eos_token_ids=self.eos_token_ids,
            num_output_tokens=row.num_output_tokens,
            seen=row.seen,
            fixed=row.fixed,
        )


def _largest(logits: Tensor) -> list[int]:
    """Returns the id of each row's largest logit, the lowest id among equals; `NO_TOKEN` for a row whose largest logit
    is not finite."""
    rows = logits.numpy()  # numpy's argmax takes a twentieth of the time of torch's
    token_ids: list[int] = rows.argmax(axis=-1).tolist()  # in a row with a NaN, the index of that NaN
    return [at if math.isfinite(rows[row, at]) else NO_TOKEN for row, at in enumerate(token_ids)]


def _draw_of(row: SamplingRow) -> Draw:
    seed = row.params.seed
    assert seed is not None, "whoever hands in a request that has no seed draws one"
    return Draw(seed, row.choice_index, row.position)


def _logprobs(logits: Tensor, rows: Sequence[SamplingRow], token_ids: Sequence[int]) -> dict[int, TokenLogprobs]:
    """Returns, by row, the log-probabilities that rows with a token ask for, from their unmodified logits."""
    num_top = {
        index: row.params.logprobs
        for index, row in enumerate(rows)
        if row.params.logprobs is not None and token_ids[index] != NO_TOKEN
    }
    if not num_top:
        return {}
    found = token_logprobs(
        [logits[index] for index in num_top], [token_ids[index] for index in num_top], max(num_top.values())
    )
    return {
        index: TokenLogprobs(entry.token_id, entry.logprob, entry.rank, entry.top[:k])
        for (index, k), entry in zip(num_top.items(), found, strict=True)
    }
