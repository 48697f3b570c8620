"""Linear layers whose weights stay on the GPU as AWQ or GPTQ publish them."""

import torch
from torch import Tensor

from paged_kernels.prequantized_weight import PrequantizedFormat, PrequantizedWeight
from paged_kernels.triton_device.prequantized import dequantize_kernel, prequantized_matmul_kernel
from paged_kernels.triton_launch import (
    Argument,
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
_MOST_ROWS = 256  # beyond, writing the weights dequantised costs less than dequantising them for every 64 rows


def prequantized_matmul(x: Tensor, weight: PrequantizedWeight, bias: Tensor | None = None) -> Tensor:
    """Returns `x` `[num_rows, num_inputs]` times the dequantised weight, plus `bias` `[num_outputs]`, as `[num_rows,
    num_outputs]` in x's dtype. Weights are rounded to that dtype; products and bias are summed in float32."""
    if x.shape[1] != weight.num_inputs or weight.num_outputs % (32 // weight.bits) or x.stride(-1) != 1:
        raise ValueError(f"x {tuple(x.shape)} does not fit {weight.num_inputs} x {weight.num_outputs} weights")
    if x.shape[0] > _MOST_ROWS:
        dense = torch.empty((weight.num_inputs, weight.num_outputs), dtype=x.dtype, device=x.device)
        launch([plan_dequantize(dense, weight)])
        return x @ dense if bias is None else torch.addmm(bias, x, dense)
    traits = traits_of(x.device)
    splits = _num_splits(x.shape[0], weight, traits)
    if splits == 1:
        output = torch.empty((x.shape[0], weight.num_outputs), dtype=x.dtype, device=x.device)
        launch([plan_prequantized_matmul(output, x, weight, splits, bias)])
        return output
    parts = torch.empty((splits, x.shape[0], weight.num_outputs), dtype=torch.float32, device=x.device)
    launch([plan_prequantized_matmul(parts, x, weight, splits)])
    total = parts.sum(0)
    return (total if bias is None else total.add_(bias)).to(x.dtype)


def plan_prequantized_matmul(
    output: Tensor, x: Tensor, weight: PrequantizedWeight, splits: int, bias: Tensor | None = None
) -> KernelCall:
    """Plans the product. `bias` is allowed only with one split: the caller sums several parts."""
    num_rows, num_inputs = x.shape
    tile_rows = min(64, max(16, next_power_of_two(num_rows)))
    return KernelCall(
        prequantized_matmul_kernel,
        (ceil_divide(weight.num_outputs, _TILE_OUTPUTS), ceil_divide(num_rows, tile_rows), splits),
        {
            "output": output,
            "x": x,
            **_stored(weight),
            "bias": bias,
            "num_rows": num_rows,
            **_sizes(weight),
            "inputs_per_split": ceil_divide(ceil_divide(num_inputs, _TILE_INPUTS), splits) * _TILE_INPUTS,
            "x_stride": x.stride(0),
        },
        _constants(weight)
        | {"HAS_BIAS": bias is not None, "TILE_ROWS": tile_rows, "DOT_FP32": widen_products(x.dtype)},
        num_stages=3,
    )


def plan_dequantize(output: Tensor, weight: PrequantizedWeight) -> KernelCall:
    """Plans the dequantisation into `output` `[num_inputs, num_outputs]`, contiguous."""
    tiles = (ceil_divide(weight.num_outputs, _TILE_OUTPUTS), ceil_divide(weight.num_inputs, _TILE_INPUTS))
    return KernelCall(
        dequantize_kernel, tiles, {"output": output, **_stored(weight), **_sizes(weight)}, _constants(weight)
    )


def _stored(weight: PrequantizedWeight) -> dict[str, Argument]:
    return {
        "codes": weight.codes,
        "zeros": weight.zeros,
        "scales": weight.scales,
        "group_of_input": weight.group_of_input,
    }


def _sizes(weight: PrequantizedWeight) -> dict[str, Argument]:
    return {
        "num_outputs": weight.num_outputs,
        "num_inputs": weight.num_inputs,
        "group_size": weight.group_size,
        "zero_offset": int(weight.format is PrequantizedFormat.GPTQ),
    }


def _constants(weight: PrequantizedWeight) -> dict[str, int | bool]:
    return {
        "BITS": weight.bits,
        "AWQ": weight.format is PrequantizedFormat.AWQ,
        "SHUFFLED": weight.group_of_input is not None,
        "ONE_GROUP": weight.group_of_input is None and weight.group_size % _TILE_INPUTS == 0,
        "TILE_OUTPUTS": _TILE_OUTPUTS,
        "TILE_INPUTS": _TILE_INPUTS,
    }


def _num_splits(num_rows: int, weight: PrequantizedWeight, traits: GpuTraits) -> int:
    """Returns into how many parts the inputs are split: few rows make few programs."""
    programs = ceil_divide(weight.num_outputs, _TILE_OUTPUTS) * ceil_divide(max(1, num_rows), 64)
    most = max(1, weight.num_inputs // (4 * _TILE_INPUTS))
    return min(ceil_divide(_PROGRAMS_PER_SM * traits.num_sms, programs), most, _MAX_SPLITS)
