"""The sampler for logits on a GPU: rows become device tensors in one copy, one kernel draws, and the tokens come back
in one read, which is all that waits for the device.

Invariant: the same row gives the token that `Sampler` gives, unless two tokens' noisy scores are closer than the
rounding of float32.
"""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from paged_kernels.triton_sampling import EDIT_BANNED, EDIT_SEEN, SamplingTensors, sample_tokens
from torch import Tensor

from kvrelay.core.errors import KVRelayError
from kvrelay.engine.penalties import changes_logits
from kvrelay.engine.sampler import SampledToken, SamplingRow, logprobs_of

_ALIGNMENT = 16  # bytes; what Triton assumes of every pointer it has seen aligned
_DTYPES = {
    "temperatures": np.float32,
    "top_ks": np.int32,
    "top_ps": np.float64,
    "log_min_ps": np.float32,
    "repetitions": np.float64,
    "seeds": np.uint64,
    "positions": np.int32,
    "choices": np.int32,
    "edit_starts": np.int32,
    "edit_tokens": np.int32,
    "edit_biases": np.float32,
    "edit_amounts": np.float32,
    "edit_flags": np.int32,
}
_TORCH_DTYPES = {
    np.float32: torch.float32,
    np.float64: torch.float64,
    np.int32: torch.int32,
    np.uint64: torch.int64,  # the same bits
}


class DeviceSampler:
    """`Sampler` for CUDA. Stateless; any thread may call it."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        """As `Sampler.sample`; raises KVRelayError for a row whose largest logit is not finite."""
        tensors = sampling_tensors(rows, self.eos_token_ids, logits.device)
        token_ids: list[int] = sample_tokens(logits, tensors).tolist()
        bad = [index for index, token_id in enumerate(token_ids) if token_id < 0]
        if bad:
            raise KVRelayError(f"the model returned logits that are not finite (rows {bad} of {len(rows)})")
        return [
            SampledToken(token_id, logprobs_of(row, logits[index], token_id))
            for index, (row, token_id) in enumerate(zip(rows, token_ids, strict=True))
        ]


def sampling_tensors(
    rows: Sequence[SamplingRow], eos_token_ids: Sequence[int], device: torch.device
) -> SamplingTensors:
    """What the kernel reads for `rows`, in one block of memory on `device`."""
    columns: dict[str, list[int] | list[float]] = {
        "temperatures": [row.params.temperature for row in rows],
        "top_ks": [row.params.top_k for row in rows],
        "top_ps": [row.params.top_p for row in rows],
        "log_min_ps": [math.log(row.params.min_p) if row.params.min_p > 0.0 else -math.inf for row in rows],
        "repetitions": [row.params.repetition_penalty for row in rows],
        "seeds": [row.params.seed or 0 for row in rows],
        "positions": [row.position for row in rows],
        "choices": [row.choice_index for row in rows],
    }
    return _pack(columns | _edits(rows, eos_token_ids), device)


def _edits(rows: Sequence[SamplingRow], eos_token_ids: Sequence[int]) -> dict[str, list[int] | list[float]]:
    starts = [0]
    tokens: list[int] = []
    biases: list[float] = []
    amounts: list[float] = []
    flags: list[int] = []
    for row in rows:
        if changes_logits(row.params, row.num_output_tokens):
            bias, amount, flag = _edits_of(row, eos_token_ids)
            for token in sorted({*bias, *amount, *flag}):
                tokens.append(token)
                biases.append(bias.get(token, 0.0))
                amounts.append(amount.get(token, 0.0))
                flags.append(flag[token])
        starts.append(len(tokens))
    return {
        "edit_starts": starts,
        "edit_tokens": tokens,
        "edit_biases": biases,
        "edit_amounts": amounts,
        "edit_flags": flags,
    }


def _edits_of(
    row: SamplingRow, eos_token_ids: Sequence[int]
) -> tuple[dict[int, float], dict[int, float], Counter[int]]:
    """Of one row: what is added, what is subtracted at last, and flags, each by token id."""
    params = row.params
    bias: dict[int, float] = {}
    for token, amount in params.logit_bias:
        bias[token] = bias.get(token, 0.0) + amount
    flags: Counter[int] = Counter()
    if row.num_output_tokens < params.min_tokens:
        ends = params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *eos_token_ids)
        flags.update(dict.fromkeys(ends, EDIT_BANNED))
    if params.repetition_penalty != 1.0:
        flags.update(dict.fromkeys((*row.prompt_token_ids, *row.output_token_ids), EDIT_SEEN))
    amounts: dict[int, float] = {}
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        counts = Counter(row.output_token_ids)
        amounts = {token: params.presence_penalty + params.frequency_penalty * count for token, count in counts.items()}
    return bias, amounts, flags


def _pack(columns: dict[str, list[int] | list[float]], device: torch.device) -> SamplingTensors:
    arrays = {name: np.array(values, dtype=_DTYPES[name]) for name, values in columns.items()}
    offsets: dict[str, int] = {}
    size = 0
    for name, array in arrays.items():
        offsets[name] = size
        size += -(-max(1, array.nbytes) // _ALIGNMENT) * _ALIGNMENT
    staging = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for name, array in arrays.items():
        staging.numpy()[offsets[name] : offsets[name] + array.nbytes] = array.view(np.uint8)
    packed = staging.to(device, non_blocking=True)
    return SamplingTensors(
        **{
            name: packed[offsets[name] : offsets[name] + array.nbytes].view(_TORCH_DTYPES[_DTYPES[name]])
            for name, array in arrays.items()
        }
    )
