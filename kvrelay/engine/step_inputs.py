"""The inputs of a step as flat arrays, with the step's sequences one after the other.

Invariant: the sizes of all arrays but the block tables follow from the numbers of tokens and sequences, padding
included.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvrelay.engine.plan import SchedulerOutput
from kvrelay.engine.sampling.sampler import SamplingRow

Array = npt.NDArray[Any]

_PADDING_SLOT = -1  # no KV is written to it


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of a step as lists: most steps have so few tokens that numpy would cost more than it saves.

    One entry per token: `token_ids`, `input_rows` (-1 if the token is known), `positions`, `slots`. One entry per
    sequence: `block_tables`, `seq_lens`, and `query_start_loc`, which has one more. One entry per sampling row: `rows`,
    and `hidden_rows`, the hidden state that the row reads; parallel outputs share one.

    The model returns the hidden states of the last token of each sequence in `last_seqs`, in that order, or of all
    tokens if it is None.
    """

    token_ids: list[int]
    input_rows: list[int]
    positions: list[int]
    slots: list[int]
    query_start_loc: list[int]
    seq_lens: list[int]
    block_tables: list[Sequence[int]]
    rows: list[SamplingRow]
    hidden_rows: list[int]
    last_seqs: list[int] | None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_seqs(self) -> int:
        return len(self.seq_lens)

    def with_all_tokens(self) -> "StepInputs":
        """Returns the same step, of which the model returns the hidden states of all tokens."""
        if self.last_seqs is None:
            return self
        last_tokens = [self.query_start_loc[index + 1] - 1 for index in self.last_seqs]
        return replace(self, hidden_rows=[last_tokens[row] for row in self.hidden_rows], last_seqs=None)

    def arrays(self, *, num_tokens: int = 0, num_seqs: int = 0) -> dict[str, Array]:
        """Returns the arrays by name, block tables last. A step with fewer tokens or sequences is padded to
        `num_tokens` and `num_seqs`. Padding sequences have length 0, no block table, and one token each, as long as
        there are padding tokens; of the others nobody reads the results. Their KV is not written."""
        tokens, seqs = max(0, num_tokens - self.num_tokens), max(0, num_seqs - self.num_seqs)
        input_rows = _array(self.input_rows, tokens, -1, np.int64)
        starts = np.arange(self.num_tokens + 1, self.num_tokens + 1 + seqs).clip(max=self.num_tokens + tokens)
        return {
            "token_ids": _array(self.token_ids, tokens, 0, np.int64),
            "known": input_rows < 0,
            "input_rows": np.maximum(input_rows, 0),
            "positions": _array(self.positions, tokens, 0, np.int64),
            "slots": _array(self.slots, tokens, _PADDING_SLOT, np.int64),
            "query_start_loc": np.concatenate((self.query_start_loc, starts), dtype=np.int32),
            "seq_lens": _array(self.seq_lens, seqs, 0, np.int32),
            "block_tables": padded_tables(self.block_tables),
        }


def flatten(plan: SchedulerOutput, block_size: int) -> StepInputs:
    """Returns the inputs of a planned step."""
    last_seqs: list[int] | None = [] if _reads_last_only(plan) else None
    inputs = StepInputs([], [], [], [], [0], [], [], [], [], last_seqs)
    for index, entry in enumerate(plan.scheduled):
        table, start = entry.block_table, entry.start
        end = start + entry.num_scheduled_tokens
        inputs.token_ids.extend(entry.token_ids)
        inputs.input_rows.extend([-1 if entry.input_row is None else entry.input_row] * entry.num_scheduled_tokens)
        inputs.positions.extend(range(start, end))
        inputs.slots.extend([table[at // block_size] * block_size + at % block_size for at in range(start, end)])
        inputs.query_start_loc.append(len(inputs.token_ids))
        inputs.seq_lens.append(end)
        inputs.block_tables.append(table)
        inputs.rows.extend(entry.rows)
        if last_seqs is not None and entry.rows:
            last_seqs.append(index)
        last_row = len(inputs.token_ids if last_seqs is None else last_seqs) - 1
        inputs.hidden_rows.extend([last_row] * len(entry.rows))
    return inputs


def _reads_last_only(plan: SchedulerOutput) -> bool:
    """Tells whether the model need return only the hidden states that are sampled from. That does not hold with
    log-probabilities of a prompt, which read all of them, nor for a step of one token per sequence, which may replay a
    recorded step."""
    return plan.num_scheduled_tokens > len(plan.scheduled) and all(
        entry.prompt_logprobs is None for entry in plan.scheduled
    )


def padded_tables(block_tables: Sequence[Sequence[int]]) -> Array:
    """Returns `[num_seqs, length of the longest table]` int32, padded with 0."""
    padded = np.zeros((len(block_tables), max(map(len, block_tables))), dtype=np.int32)
    for row, block_table in zip(padded, block_tables, strict=True):
        row[: len(block_table)] = block_table
    return padded


def _array(values: list[int], padding: int, fill: int, dtype: type[np.int32] | type[np.int64]) -> Array:
    return np.array(values + [fill] * padding, dtype=dtype)
