"""Linear layers whose weights stay in AWQ's or GPTQ's 4-bit form on the GPU."""

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from paged_kernels.triton_device.int4 import int4_matmul_kernel
from paged_kernels.triton_launch import (
    GpuTraits,
    KernelCall,
    ceil_divide,
    launch,
    next_power_of_two,
    traits_of,
    widen_products,
)

_TILE_OUTPUTS = 64
_TILE_INPUTS = 64
_MAX_SPLITS = 16
_PROGRAMS_PER_SM = 2


class Int4Format(Enum):
    """How eight 4-bit codes share an int32, and whether stored zeros are one too small (GPTQ's first format)."""

    AWQ = "awq"
    GPTQ = "gptq"
    GPTQ_V2 = "gptq_v2"


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """A checkpoint's tensors as published: `qweight`, `qzeros` and `scales` of one layer.

    `codes`: AWQ `[num_inputs, num_outputs / 8]` int32, GPTQ `[num_inputs / 8, num_outputs]`. `zeros`: `[num_groups,
    num_outputs / 8]` int32. `scales`: `[num_groups, num_outputs]`. `group_of_input`: `[num_inputs]` int32 for GPTQ with
    `desc_act`, else None: input k is in group `k // group_size`.
    """

    format: Int4Format
    codes: Tensor
    zeros: Tensor
    scales: Tensor
    group_size: int
    group_of_input: Tensor | None = None

    @property
    def num_inputs(self) -> int:
        return self.codes.shape[0] * (1 if self.format is Int4Format.AWQ else 8)

    @property
    def num_outputs(self) -> int:
        return self.scales.shape[1]


def int4_matmul(x: Tensor, weight: Int4Weight) -> Tensor:
    """`x` `[num_rows, num_inputs]` times the dequantised weight: `[num_rows, num_outputs]` in x's dtype. Weights are
    rounded to that dtype and summed in float32."""
    traits = traits_of(x.device)
    splits = _num_splits(x.shape[0], weight, traits)
    if splits == 1:
        output = torch.empty((x.shape[0], weight.num_outputs), dtype=x.dtype, device=x.device)
        launch([plan_int4_matmul(output, x, weight, splits)])
        return output
    parts = torch.empty((splits, x.shape[0], weight.num_outputs), dtype=torch.float32, device=x.device)
    launch([plan_int4_matmul(parts, x, weight, splits)])
    return parts.sum(0).to(x.dtype)


def plan_int4_matmul(output: Tensor, x: Tensor, weight: Int4Weight, splits: int) -> KernelCall:
    num_rows, num_inputs = x.shape
    if num_inputs != weight.num_inputs or weight.num_outputs % 8 or x.stride(-1) != 1:
        raise ValueError(f"x {tuple(x.shape)} does not fit {weight.num_inputs} x {weight.num_outputs} weights")
    tile_rows = min(64, max(16, next_power_of_two(num_rows)))
    return KernelCall(
        int4_matmul_kernel,
        (ceil_divide(weight.num_outputs, _TILE_OUTPUTS), ceil_divide(num_rows, tile_rows), splits),
        {
            "output": output,
            "x": x,
            "codes": weight.codes,
            "zeros": weight.zeros,
            "scales": weight.scales,
            "group_of_input": weight.group_of_input,
            "num_rows": num_rows,
            "num_outputs": weight.num_outputs,
            "num_inputs": num_inputs,
            "group_size": weight.group_size,
            "inputs_per_split": ceil_divide(ceil_divide(num_inputs, _TILE_INPUTS), splits) * _TILE_INPUTS,
            "zero_offset": int(weight.format is Int4Format.GPTQ),
            "x_stride": x.stride(0),
        },
        {
            "AWQ": weight.format is Int4Format.AWQ,
            "SHUFFLED": weight.group_of_input is not None,
            "ONE_GROUP": weight.group_of_input is None and weight.group_size % _TILE_INPUTS == 0,
            "TILE_ROWS": tile_rows,
            "TILE_OUTPUTS": _TILE_OUTPUTS,
            "TILE_INPUTS": _TILE_INPUTS,
            "DOT_FP32": widen_products(x.dtype),
        },
        num_stages=3,
    )


def _num_splits(num_rows: int, weight: Int4Weight, traits: GpuTraits) -> int:
    """Few rows make few programs: then the inputs are split, too."""
    programs = ceil_divide(weight.num_outputs, _TILE_OUTPUTS) * ceil_divide(max(1, num_rows), 64)
    most = max(1, weight.num_inputs // (4 * _TILE_INPUTS))
    return min(ceil_divide(_PROGRAMS_PER_SM * traits.num_sms, programs), most, _MAX_SPLITS)
