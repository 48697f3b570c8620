"""A linear layer's weights as AWQ and GPTQ publish them: which bits of which int32 are which code.

weight[k, n] = (code[k, n] - zero[group(k), n]) * scale[group(k), n] for input k and output n. An int32 holds 32 / bits
codes, the first in its lowest bits. AWQ puts eight outputs of one input into it in the order 0, 2, 4, 6, 1, 3, 5, 7,
GPTQ consecutive inputs of one output. Zeros are packed along outputs, in the order of the codes there and in order
here.
"""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

import torch
from torch import Tensor

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where each of eight outputs lies in its int32, in nibbles


class PrequantizedFormat(Enum):
    """How codes share an int32, and whether stored zeros are one too small (GPTQ's first format)."""

    AWQ = "awq"
    GPTQ = "gptq"
    GPTQ_V2 = "gptq_v2"


@dataclass(frozen=True, slots=True)
class PrequantizedWeight:
    """A checkpoint's tensors: `qweight`, `qzeros`, `scales` and `g_idx` of one layer.

    `codes`: AWQ `[num_inputs, num_outputs / 8]` int32, GPTQ `[num_inputs / (32 / bits), num_outputs]`. `zeros`:
    `[num_groups, num_outputs / (32 / bits)]` int32. `scales`: `[num_groups, num_outputs]`. `group_of_input`:
    `[num_inputs]` int32 for GPTQ with `desc_act`, else None: input k is in group `k // group_size`. AWQ has 4 bits.
    """

    format: PrequantizedFormat
    codes: Tensor
    zeros: Tensor
    scales: Tensor
    group_size: int
    group_of_input: Tensor | None = None
    bits: Literal[8, 4] = 4

    @property
    def num_inputs(self) -> int:
        return self.codes.shape[0] * (1 if self.format is PrequantizedFormat.AWQ else 32 // self.bits)

    @property
    def num_outputs(self) -> int:
        return self.scales.shape[1]


def dequantize(weight: PrequantizedWeight) -> Tensor:
    """Returns the exact weights, `[num_inputs, num_outputs]` float64."""
    groups = weight.group_of_input
    if groups is None:
        groups = torch.arange(weight.num_inputs, device=weight.codes.device) // weight.group_size
    return (unpack_codes(weight) - unpack_zeros(weight)[groups]).double() * weight.scales.double()[groups]


def in_group_order(weight: PrequantizedWeight) -> tuple[PrequantizedWeight, Tensor]:
    """Sorts the inputs of a layer with `group_of_input` by group, all of which have `group_size` inputs. Returns the
    layer, whose groups need no index any more, and the order, `[num_inputs]` int64: it is to be multiplied with
    `x[:, order]`."""
    assert weight.group_of_input is not None and weight.format is not PrequantizedFormat.AWQ
    order = weight.group_of_input.argsort(stable=True)
    per_word = 32 // weight.bits
    fields = unpack_codes(weight)[order].view(-1, per_word, weight.num_outputs)
    codes = torch.zeros_like(weight.codes)
    for index in range(per_word):
        codes |= fields[:, index].int() << (weight.bits * index)
    return replace(weight, codes=codes, group_of_input=None), order


def unpack_codes(weight: PrequantizedWeight) -> Tensor:
    """Returns the codes, `[num_inputs, num_outputs]` uint8."""
    if weight.format is PrequantizedFormat.AWQ:
        return _unpack(weight.codes, weight, axis=1)
    return _unpack(weight.codes, weight, axis=0)


def unpack_zeros(weight: PrequantizedWeight) -> Tensor:
    """Returns what codes count from: `[num_groups, num_outputs]` int16, 0 to 2^bits.

    GPTQ's first format stores one less. Its writers cannot store a zero of 0 (it spills into the neighbours), and its
    kernels read the largest stored value as 2^bits, as this function does.
    """
    stored = _unpack(weight.zeros, weight, axis=1).to(torch.int16)
    return stored + 1 if weight.format is PrequantizedFormat.GPTQ else stored


def _unpack(packed: Tensor, weight: PrequantizedWeight, *, axis: int) -> Tensor:
    """Unpacks one field after the other, so that only one is ever held in more than a byte."""
    per_word = 32 // weight.bits
    shape = list(packed.shape)
    shape.insert(axis + 1, per_word)
    fields = torch.empty(shape, dtype=torch.uint8, device=packed.device)
    for index in range(per_word):
        place = AWQ_ORDER[index] if weight.format is PrequantizedFormat.AWQ else index
        fields.select(axis + 1, index).copy_((packed >> (weight.bits * place)) & (2**weight.bits - 1))
    return fields.flatten(axis, axis + 1)
