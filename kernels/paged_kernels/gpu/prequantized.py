"""Linear layers whose weights stay on the GPU as AWQ or GPTQ publish them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from paged_kernels.gpu.device.prequantized import (
    add_splits_kernel,
    dequantize_kernel,
    prequantized_matmul_kernel,
)
from paged_kernels.gpu.launch import (
    Argument,
    GpuTraits,
    KernelCall,
    ceil_divide,
    launch,
    next_power_of_two,
    traits_of,
    widen_products,
)
from paged_kernels.prequantized_weight import PrequantizedFormat, PrequantizedWeight

_MAX_SPLITS = 16
_MOST_ROWS = 256  # beyond, writing the weights dequantised costs less than dequantising them for every tile of rows
_SUM_TILE = 512


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """Launch parameters of a product. A program has `rows` by `outputs` sums, and takes up `inputs` at a time."""

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


def prequantized_matmul(x: Tensor, weight: PrequantizedWeight, bias: Tensor | None = None) -> Tensor:
    """Returns `x` `[num_rows, num_inputs]` times the dequantised weight, plus `bias` `[num_outputs]`, as `[num_rows,
    num_outputs]` in x's dtype. Weights are rounded to that dtype; products and bias are summed in float32. The weight's
    inputs are in the order of their groups (`in_group_order`)."""
    assert weight.group_of_input is None
    if x.shape[1] != weight.num_inputs or weight.num_outputs % (32 // weight.bits) or x.stride(-1) != 1:
        raise ValueError(f"x {tuple(x.shape)} does not fit {weight.num_inputs} x {weight.num_outputs} weights")
    # On sm_100 Triton would multiply such tiles of float32 as TF32, "ieee" or not.
    if x.dtype == torch.float32 or x.shape[0] > _MOST_ROWS:
        dense = torch.empty((weight.num_inputs, weight.num_outputs), dtype=x.dtype, device=x.device)
        launch([plan_dequantize(dense, weight)])
        return x @ dense if bias is None else torch.addmm(bias, x, dense)
    output = torch.empty((x.shape[0], weight.num_outputs), dtype=x.dtype, device=x.device)
    traits = traits_of(x.device)
    launch(plan_product(output, x, weight, bias, product_tiles(x, weight, traits), traits))
    return output


def product_tiles(x: Tensor, weight: PrequantizedWeight, traits: GpuTraits) -> ProductTiles:
    """Returns the launch parameters that are the fastest on an H100, as far as they fit: tiles of x are in shared
    memory, sums in registers."""
    inputs = _tile_inputs(weight, most=128)
    rows = min(256 if traits.is_sm_90_or_later else 128, max(16, next_power_of_two(x.shape[0])))
    if rows > 64:
        inputs = min(inputs, max(32, inputs // 2))
        return ProductTiles(rows, 128, inputs, num_warps=8, num_stages=3, programs_per_sm=256 // rows)
    if weight.bits == 8 and (rows <= 32 or traits.is_sm_90_or_later):
        return ProductTiles(rows, 64, inputs, num_warps=4, num_stages=4 if rows <= 32 else 3, programs_per_sm=2)
    if rows > 32:
        return ProductTiles(rows, 128, min(64, inputs), num_warps=4, num_stages=3, programs_per_sm=4)
    # Codes of different inputs of AWQ's are in the same banks of shared memory, more so if a tile has more outputs.
    outputs, num_stages = (64, 4) if weight.format is PrequantizedFormat.AWQ else (128, 3)
    return ProductTiles(rows, outputs, inputs, num_warps=4, num_stages=num_stages, programs_per_sm=7)


def plan_product(
    output: Tensor, x: Tensor, weight: PrequantizedWeight, bias: Tensor | None, tiles: ProductTiles, traits: GpuTraits
) -> list[KernelCall]:
    """Plans the product. Few rows make few programs, so the inputs are split over several, and their sums added."""
    (num_rows, num_inputs), num_outputs = x.shape, weight.num_outputs
    grid = (ceil_divide(num_outputs, tiles.outputs), ceil_divide(num_rows, tiles.rows))
    wanted = tiles.programs_per_sm * traits.num_sms // max(1, grid[0] * grid[1])
    input_tiles = ceil_divide(num_inputs, tiles.inputs)
    tiles_per_split = ceil_divide(input_tiles, max(1, min(wanted, _MAX_SPLITS)))
    splits = ceil_divide(input_tiles, tiles_per_split)
    parts = output
    if splits > 1:
        parts = torch.empty((splits, num_rows, num_outputs), dtype=torch.float32, device=output.device)
    product_bias = bias if splits == 1 else None
    product = KernelCall(
        prequantized_matmul_kernel,
        (*grid, splits),
        {
            "output": parts,
            "x": x,
            **_stored(weight),
            "bias": product_bias,
            "num_rows": num_rows,
            **_sizes(weight),
            "inputs_per_split": tiles_per_split * tiles.inputs,
            "x_stride": x.stride(0),
        },
        _constants(weight, tiles.outputs, tiles.inputs)
        | {"HAS_BIAS": product_bias is not None, "TILE_ROWS": tiles.rows, "DOT_FP32": widen_products(x.dtype)},
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return [product] if splits == 1 else [product, _plan_sum(output, parts, bias)]


def plan_dequantize(output: Tensor, weight: PrequantizedWeight) -> KernelCall:
    """Plans the dequantisation into `output` `[num_inputs, num_outputs]`, contiguous."""
    tile_outputs, tile_inputs = 64, _tile_inputs(weight, most=64)
    return KernelCall(
        dequantize_kernel,
        (ceil_divide(weight.num_outputs, tile_outputs), ceil_divide(weight.num_inputs, tile_inputs)),
        {"output": output, **_stored(weight), **_sizes(weight)},
        _constants(weight, tile_outputs, tile_inputs),
    )


def _plan_sum(output: Tensor, parts: Tensor, bias: Tensor | None) -> KernelCall:
    num_splits, num_rows, num_outputs = parts.shape
    return KernelCall(
        add_splits_kernel,
        (ceil_divide(num_outputs, _SUM_TILE), num_rows),
        {
            "output": output,
            "parts": parts,
            "bias": bias,
            "num_rows": num_rows,
            "num_outputs": num_outputs,
            "num_splits": num_splits,
        },
        {"HAS_BIAS": bias is not None, "SPLITS": next_power_of_two(num_splits), "TILE_OUTPUTS": _SUM_TILE},
    )


def _tile_inputs(weight: PrequantizedWeight, *, most: int) -> int:
    """Returns how many inputs a tile has: a whole group, or a part of one, if its size allows."""
    return min(most, max(32, weight.group_size & -weight.group_size))


def _stored(weight: PrequantizedWeight) -> dict[str, Argument]:
    return {
        "codes": weight.codes.view(torch.uint8),
        "zeros": weight.zeros.view(torch.uint8),
        "scales": weight.scales,
    }


def _sizes(weight: PrequantizedWeight) -> dict[str, Argument]:
    return {
        "num_outputs": weight.num_outputs,
        "num_inputs": weight.num_inputs,
        "group_size": weight.group_size,
        "code_stride": 4 * weight.codes.shape[1],
        "zero_stride": 4 * weight.zeros.shape[1],
    }


def _constants(weight: PrequantizedWeight, tile_outputs: int, tile_inputs: int) -> dict[str, int | bool]:
    return {
        "BITS": weight.bits,
        "AWQ": weight.format is PrequantizedFormat.AWQ,
        "ZERO_OFFSET": int(weight.format is PrequantizedFormat.GPTQ),
        "ONE_GROUP": weight.group_size % tile_inputs == 0,
        "TILE_OUTPUTS": tile_outputs,
        "TILE_INPUTS": tile_inputs,
    }
