"""Samples tokens from logits. The same row gives the same token, whatever else is in the batch.

Order of operations for one row:

1. log-probabilities, if asked for, from the unmodified logits (`logprobs.py`)
2. logit bias, `min_tokens`, repetition, presence and frequency penalties (`penalties.py`)
3. a greedy row takes the largest logit, among equals the one of the lowest id, and ends here
4. temperature, top-k, top-p, min-p and a random choice (`random_choice.py`)
"""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from torch import Tensor

from kvrelay.core.generation.outputs import TokenLogprobs
from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.core.record import record
from kvrelay.engine.sampling.fixed_edits import NO_EDITS, FixedEdits
from kvrelay.engine.sampling.logprobs import token_logprobs
from kvrelay.engine.sampling.penalties import Logits, adjust, changes_logits
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
        """Returns one token per row. `logits` is `[len(rows), vocab_size]` float32 on the CPU, and no row shares memory
        with another: rows are changed for their requests while they are read, and are as before afterwards.

        A row with a NaN, an infinity or nothing to choose from gets `NO_TOKEN`, since the model's output cannot be
        trusted then.
        """
        values = logits.numpy()
        token_ids = _largest(values)
        trusted = [index for index, token_id in enumerate(token_ids) if token_id != NO_TOKEN]
        with ExitStack() as changes:
            for index in trusted:
                row = rows[index]
                if changes_logits(row.params, row.num_output_tokens):
                    changes.callback(self._adjust(values[index], row))
                    if row.params.greedy:
                        token_ids[index] = int(values[index].argmax())
            drawn = [index for index in trusted if not rows[index].params.greedy]
            for index, token_id in zip(drawn, _draw(logits, rows, drawn), strict=True):
                token_ids[index] = token_id
        logprobs = _logprobs(logits, rows, token_ids)
        return [SampledToken(token_id, logprobs.get(index)) for index, token_id in enumerate(token_ids)]

    def _adjust(self, values: Logits, row: SamplingRow) -> Callable[[], None]:
        return adjust(
            values,
            row.params,
            eos_token_ids=self.eos_token_ids,
            num_output_tokens=row.num_output_tokens,
            seen=row.seen,
            fixed=row.fixed,
        )


def _largest(logits: Logits) -> list[int]:
    """Returns the id of each row's largest logit, the lowest id among equals; `NO_TOKEN` for a row whose largest logit
    is not finite."""
    # numpy's argmax takes a twentieth of the time of torch's. In a row with a NaN it is the index of that NaN.
    token_ids: list[int] = logits.argmax(axis=-1).tolist()
    return [at if math.isfinite(logits[row, at]) else NO_TOKEN for row, at in enumerate(token_ids)]


def _draw(logits: Tensor, rows: Sequence[SamplingRow], wanted: Sequence[int]) -> list[int]:
    """Returns a random token for each of the rows with these indices."""
    if not wanted:
        return []
    drawn = [rows[index] for index in wanted]
    return choose([logits[index] for index in wanted], [row.params for row in drawn], [_draw_of(row) for row in drawn])


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
