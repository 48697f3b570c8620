"""Linear layers over AWQ's and GPTQ's weights on the CPU, repacked for the integer kernels of `quantized.py`.

Exact: codes, zeros and scales are those of the checkpoint. Groups that `desc_act` has scattered are gathered: the
weight's inputs are put in order of their groups once, and the layer's inputs are put in that order in every call.
"""

from dataclasses import dataclass

from torch import Tensor

from paged_kernels.cpu import quantized
from paged_kernels.cpu.quantized_weight import QuantizedWeight
from paged_kernels.cpu.weight_memory import WeightMemory
from paged_kernels.prequantized_weight import PrequantizedWeight, unpack_codes, unpack_zeros

_KERNEL_GROUP_SIZES = (128, 64, 32)
"""A checkpoint's larger groups become several with equal scales."""


@dataclass(frozen=True, slots=True)
class RepackedWeight:
    """A weight whose input i is the layer's input `input_order[i]` (`[num_inputs]` int64; None where they are in
    order)."""

    weight: QuantizedWeight
    input_order: Tensor | None

    @property
    def num_bytes(self) -> int:
        return self.weight.num_bytes + (0 if self.input_order is None else self.input_order.nbytes)


def repack(prequantized: PrequantizedWeight, memory: WeightMemory | None = None) -> RepackedWeight:
    """Returns a packed copy. `group_size` is a multiple of 32, or all inputs are one group; with `group_of_input` every
    group has `group_size` inputs. `memory` as for `quantized.empty_weight`."""
    codes = unpack_codes(prequantized)
    order = None
    if prequantized.group_of_input is not None:
        order = prequantized.group_of_input.argsort(stable=True)
        codes = codes[order]
    group_size = _kernel_group_size(prequantized.group_size, prequantized.num_inputs)
    repeats = -(-min(prequantized.group_size, prequantized.num_inputs) // group_size)
    scales = prequantized.scales.float().repeat_interleave(repeats, dim=0)
    zeros = unpack_zeros(prequantized).repeat_interleave(repeats, dim=0)
    weight = quantized.pack_codes(codes, zeros, scales, prequantized.bits, group_size, memory)
    return RepackedWeight(weight, order)


def linear(x: Tensor, repacked: RepackedWeight, bias: Tensor | None = None) -> Tensor:
    """Multiplies `[num_rows, num_inputs]` to `[num_rows, num_outputs]` of the same dtype, like `quantized.linear`."""
    ordered = x if repacked.input_order is None else x.index_select(1, repacked.input_order)
    return quantized.linear(ordered, repacked.weight, bias)


def _kernel_group_size(group_size: int, num_inputs: int) -> int:
    fitting = [size for size in _KERNEL_GROUP_SIZES if group_size % size == 0]
    if fitting:
        return fitting[0]
    if group_size < num_inputs:
        raise ValueError(f"group_size {group_size} is no multiple of 32")
    return _KERNEL_GROUP_SIZES[-1]
