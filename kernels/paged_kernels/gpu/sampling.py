"""Logits to tokens on a GPU without reading anything back: per-row parameters lie in device tensors.

Chooses the tokens that the host's sampler chooses for the same seed, position and output index. Both round float32 (exp
above all) in their own way, so two tokens whose noisy scores differ by less than that may change places.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from paged_kernels.gpu.device.sampling import BANNED, GROUP, SEEN, sample_kernel
from paged_kernels.gpu.launch import KernelCall, ceil_divide, launch, next_power_of_two

_TILE = 2048  # what a loop keeps for each lane of a tile fits in registers
_NUM_WARPS = 16  # a row is one program's work, and rows are few
EDIT_BANNED = int(BANNED.value)
"""Flag of a token that would end the output too early. Ignored in a row in which nothing else could be chosen."""
EDIT_SEEN = int(SEEN.value)
"""Flag of a token that the repetition penalty applies to."""


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """One entry per row of logits, all on their device.

    An edit changes one logit: `edit_biases` is added, EDIT_BANNED makes it -inf, EDIT_SEEN applies the repetition
    penalty, `edit_amounts` is subtracted. Those of row i are entries `edit_starts[i] : edit_starts[i + 1]`, and no two
    have the same token.
    """

    temperatures: Tensor  # float32; 0 is greedy
    top_ks: Tensor  # int32; 0 is off
    top_ps: Tensor  # float64
    log_min_ps: Tensor  # float32; -inf is off
    repetitions: Tensor  # float64
    seeds: Tensor  # int64, the bits of the unsigned seed
    positions: Tensor  # int32
    choices: Tensor  # int32
    edit_starts: Tensor  # [num_rows + 1] int32
    edit_tokens: Tensor  # int32
    edit_biases: Tensor  # float32
    edit_amounts: Tensor  # float32
    edit_flags: Tensor  # int32


def sample_tokens(logits: Tensor, tensors: SamplingTensors, token_ids: Tensor) -> None:
    """Writes one token id per row of `logits` `[num_rows, vocab_size]` float32 to `token_ids`, `[num_rows]` int64 on
    the same device; -1 for a row whose largest logit is not finite. Does not write to `logits`."""
    launch([plan_sample(token_ids, logits, tensors)])


def plan_sample(token_ids: Tensor, logits: Tensor, tensors: SamplingTensors) -> KernelCall:
    num_rows, vocab_size = logits.shape
    tile = min(_TILE, max(256, next_power_of_two(vocab_size)))
    empty = partial(torch.empty, device=logits.device)
    return KernelCall(
        sample_kernel,
        (num_rows,),
        {
            "token_ids": token_ids,
            "logits": logits,
            "edited_logits": empty(logits.shape, dtype=torch.float32),
            "keys": empty(num_rows, ceil_divide(vocab_size, tile) * tile, dtype=torch.int32),
            "totals": empty(num_rows, ceil_divide(vocab_size, GROUP.value), dtype=torch.float32),
            "vocab_size": vocab_size,
            "logits_stride": logits.stride(0),
            **{name: getattr(tensors, name) for name in SamplingTensors.__dataclass_fields__},
        },
        {"TILE": tile},
        num_warps=_NUM_WARPS,
    )
