"""A plan as flat arrays: what a forward pass reads, for all sequences of the step one after the other.

Invariant: of two plans with as many tokens and sequences, padding included, every array but the block tables has the
same size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvrelay.engine.plan import SchedulerOutput
from kvrelay.engine.sampling.sampler import SamplingRow

Array = npt.NDArray[Any]

_PADDING_SLOT = -1  # nothing is written for it


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Lists, since most steps have a few tokens only, for which numpy costs more than it saves. One entry per token:
    `token_ids`, `input_rows` (-1: the token is known), `positions`, `slots`. One per sequence: `block_tables`,
    `seq_lens`, and one more in `query_start_loc`. One per sampling row: `rows`, `hidden_rows` (which of the hidden
    states it reads; parallel outputs share one).

    Hidden states are those of the last tokens of `last_seqs`, in their order, or of all tokens where that is None.
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

    @property
    def one_token_each(self) -> bool:
        return self.num_tokens == self.num_seqs

    def arrays(self, *, num_rows: int = 0) -> dict[str, Array]:
        """With `num_rows`, at least as many as sequences, a step of one token each is padded to so many. Padding has no
        slot and length 0. All but the block tables, which come last, have a size that follows from the number of tokens
        and sequences."""
        padding = max(0, num_rows - self.num_seqs)
        assert not padding or self.one_token_each, "only a step of one token each is padded"
        input_rows = _array(self.input_rows, padding, -1, np.int64)
        last = self.query_start_loc[-1]
        return {
            "token_ids": _array(self.token_ids, padding, 0, np.int64),
            "known": input_rows < 0,
            "input_rows": np.maximum(input_rows, 0),
            "positions": _array(self.positions, padding, 0, np.int64),
            "slots": _array(self.slots, padding, _PADDING_SLOT, np.int64),
            "query_start_loc": np.array([*self.query_start_loc, *range(last + 1, last + 1 + padding)], dtype=np.int32),
            "seq_lens": _array(self.seq_lens, padding, 0, np.int32),
            "block_tables": padded_tables(self.block_tables, self.num_seqs + padding),
        }


def flatten(plan: SchedulerOutput, block_size: int) -> StepInputs:
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
    """Of a step of one token each nothing is left out: it may be one that was recorded."""
    return plan.num_scheduled_tokens > len(plan.scheduled) and all(
        entry.prompt_logprobs is None for entry in plan.scheduled
    )


def padded_tables(block_tables: Sequence[Sequence[int]], num_rows: int) -> Array:
    """`[num_rows, that of the longest]` int32, padded with 0."""
    padded = np.zeros((num_rows, max(map(len, block_tables))), dtype=np.int32)
    for row, block_table in zip(padded, block_tables, strict=False):
        row[: len(block_table)] = block_table
    return padded


def _array(values: list[int], padding: int, fill: int, dtype: type[np.int32] | type[np.int64]) -> Array:
    return np.array(values + [fill] * padding, dtype=dtype)
