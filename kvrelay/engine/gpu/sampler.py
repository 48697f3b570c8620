"""The sampler for logits on a GPU. Sampling parameters are arrays among a step's inputs, one kernel draws all tokens,
and one read brings them back to the host.

Invariant: a row gives the same token as with `Sampler`, unless the noisy scores of two tokens are closer than the
rounding of float32.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from paged_kernels.gpu.sampling import EDIT_BANNED, EDIT_SEEN, SamplingTensors, sample_tokens
from torch import Tensor

from kvrelay.engine.gpu.logprobs import LaunchedLogprobs, launch_logprobs
from kvrelay.engine.gpu.packed_arrays import to_host
from kvrelay.engine.sampling.penalties import changes_logits
from kvrelay.engine.sampling.sampler import SampledToken, SamplingRow
from kvrelay.engine.sampling.seen_tokens import SeenTokens
from kvrelay.engine.step_inputs import Array

_DTYPES = {
    "temperatures": np.float32,
    "top_ks": np.int32,
    "top_ps": np.float64,
    "log_min_ps": np.float32,
    "repetitions": np.float64,
    "seeds": np.uint64,
    "positions": np.int32,
    "choices": np.int32,
}
_EDIT_DTYPES: dict[str, type[np.int32] | type[np.float32]] = {
    "edit_tokens": np.int32,
    "edit_biases": np.float32,
    "edit_amounts": np.float32,
    "edit_flags": np.int32,
}
_PREFIX = "sampling."  # keeps these names apart from those of the step's other arrays
_LOGPROB_ROWS = _PREFIX + "logprob_rows"


@dataclass(frozen=True, slots=True)
class LaunchedSampling:
    """Tokens on their way to the host. `logprob_rows` are the indices of rows that asked for log-probabilities."""

    token_ids: Tensor  # [num_rows] int64 in host memory, valid once the step has ended
    logprob_rows: tuple[int, ...]
    logprobs: LaunchedLogprobs | None

    def collect(self) -> list[SampledToken]:
        """Returns one token per row, `NO_TOKEN` for a row whose largest logit is not finite."""
        token_ids: list[int] = self.token_ids.tolist()
        if self.logprobs is None:
            return [SampledToken(token_id, None) for token_id in token_ids]
        found = dict(zip(self.logprob_rows, self.logprobs.collect(), strict=True))
        return [SampledToken(token_id, found.get(index)) for index, token_id in enumerate(token_ids)]


class GpuSampler:
    """The counterpart of `Sampler` for a GPU, in three steps: `arrays` prepares what the rows need there, `launch`
    enqueues the sampling, and `LaunchedSampling.collect` reads the result. It has no state; any thread may call it."""

    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        self.eos_token_ids = tuple(eos_token_ids)

    def arrays(self, rows: Sequence[SamplingRow]) -> dict[str, Array]:
        """Returns the arrays that `launch` needs as tensors on the GPU, under names that no other input of a step
        has."""
        arrays = {_PREFIX + name: array for name, array in sampling_arrays(rows, self.eos_token_ids).items()}
        if wanted := _logprob_rows(rows):
            arrays[_LOGPROB_ROWS] = np.array(wanted, dtype=np.int64)
        return arrays

    def launch(
        self, logits: Tensor, rows: Sequence[SamplingRow], tensors: Mapping[str, Tensor], token_ids: Tensor
    ) -> LaunchedSampling:
        """Enqueues sampling one token per row of `logits`, `[len(rows), vocab_size]` float32. Tokens are written to
        `token_ids`, `[len(rows)]` int64 on the GPU, -1 for a row that fails. `tensors` holds `arrays(rows)`."""
        names = SamplingTensors.__dataclass_fields__
        sample_tokens(logits, SamplingTensors(**{name: tensors[_PREFIX + name] for name in names}), token_ids)
        wanted = _logprob_rows(rows)
        logprobs = None
        if wanted:
            index = tensors[_LOGPROB_ROWS]
            num_top = [rows[row].params.logprobs or 0 for row in wanted]
            logprobs = launch_logprobs(logits[index], token_ids[index], num_top)
        return LaunchedSampling(to_host(token_ids), wanted, logprobs)


def _logprob_rows(rows: Sequence[SamplingRow]) -> tuple[int, ...]:
    return tuple(index for index, row in enumerate(rows) if row.params.logprobs is not None)


def sampling_arrays(rows: Sequence[SamplingRow], eos_token_ids: Sequence[int]) -> dict[str, Array]:
    """Returns what the kernel reads for `rows`: an array for each field of `SamplingTensors`."""
    columns: dict[str, list[int] | list[float]] = {
        "temperatures": [0.0 if row.params.greedy else row.params.temperature for row in rows],
        "top_ks": [row.params.top_k for row in rows],
        "top_ps": [row.params.top_p for row in rows],
        "log_min_ps": [math.log(row.params.min_p) if row.params.min_p > 0.0 else -math.inf for row in rows],
        "repetitions": [row.params.repetition_penalty for row in rows],
        "seeds": [row.params.seed or 0 for row in rows],
        "positions": [row.position for row in rows],
        "choices": [row.choice_index for row in rows],
    }
    arrays = {name: np.array(values, dtype=_DTYPES[name]) for name, values in columns.items()}
    return arrays | _edits(rows, eos_token_ids)


def _edits(rows: Sequence[SamplingRow], eos_token_ids: Sequence[int]) -> dict[str, Array]:
    """Returns the edits of all rows, one row after the other."""
    edits: list[dict[str, Array]] = []
    starts = [0]
    for row in rows:
        num_edits = 0
        if changes_logits(row.params, row.num_output_tokens):
            edits.append(_edits_of(row, eos_token_ids))
            num_edits = len(edits[-1]["edit_tokens"])
        starts.append(starts[-1] + num_edits)
    joined = {
        name: np.concatenate([one[name] for one in edits], dtype=of) if edits else np.zeros(0, dtype=of)
        for name, of in _EDIT_DTYPES.items()
    }
    return {"edit_starts": np.array(starts, dtype=np.int32), **joined}


def _edits_of(row: SamplingRow, eos_token_ids: Sequence[int]) -> dict[str, Array]:
    """Returns the edits of one row: first those of the tokens that penalties have seen, then those of other tokens with
    a bias or a ban. There may be very many of each, so that none are looped over, and biases, which a row has in every
    step, are not searched for one another."""
    params, fixed, seen = row.params, row.fixed, row.seen or SeenTokens()
    tokens, num_seen = seen.token_ids, len(seen.token_ids)
    biases: Array = np.zeros(num_seen, dtype=np.float32)
    if params.biases:
        places = np.searchsorted(fixed.biased_ids, tokens).clip(max=len(fixed.biased_ids) - 1)
        of_seen = np.where(fixed.biased_ids[places] == tokens, fixed.biases[places], 0.0)
        others = ~np.isin(fixed.biased_ids, tokens)
        tokens = np.concatenate((tokens, fixed.biased_ids[others]))
        biases = np.concatenate((of_seen, fixed.biases[others]))
    banned: Array = np.zeros(0, dtype=np.int64)
    if row.num_output_tokens < params.min_tokens:
        ends = set() if params.ignore_eos else {*eos_token_ids} - fixed.stop_token_ids
        banned = np.concatenate((fixed.stop_ids, np.array([*ends], dtype=np.int64)))
        tokens = np.concatenate((tokens, banned[~np.isin(banned, tokens)]))
        biases = np.concatenate((biases, np.zeros(len(tokens) - len(biases))))
    amounts, flags = np.zeros(len(tokens), dtype=np.float32), np.zeros(len(tokens), dtype=np.int32)
    if params.repetition_penalty != 1.0:
        flags[:num_seen] = EDIT_SEEN
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        penalties = params.presence_penalty + params.frequency_penalty * seen.output_counts
        amounts[:num_seen] = np.where(seen.output_counts > 0, penalties, 0.0)
    if len(banned):
        flags += EDIT_BANNED * np.isin(tokens, banned)
    return {"edit_tokens": tokens, "edit_biases": biases, "edit_amounts": amounts, "edit_flags": flags}
