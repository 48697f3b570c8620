"""Linear layers over weights of 8 or 4 bits: compiled on the CPU where that was built, plain torch otherwise.

Weight-only quantisation to nearest: activations keep their type, each output has a bfloat16 scale per group of inputs,
and no calibration is needed. Both ways give the same packed bytes, whose format is in `csrc/quantized/quantized.h`.
Codes that somebody else has found are packed as they are, with zeros and float32 scales.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_kernels.cpu import quantized_reference
from paged_kernels.cpu.extension import load_extension
from paged_kernels.cpu.quantized_weight import PANEL_OUTPUTS, Bits, QuantizedWeight
from paged_kernels.cpu.threads import num_threads
from paged_kernels.cpu.weight_memory import WeightMemory

GROUP_SIZES: dict[int, int] = {8: 128, 4: 64}
"""Inputs that share a scale, by bits: 8.125 and 4.25 bits per weight in all."""

_NATIVE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MANY_ROWS = 64  # from here on it is faster to widen the weights once; for bfloat16 our kernels do that themselves
_WIDENED_BYTES = 1 << 20  # of weights widened at a time, so that they stay in the cache


def empty_weight(num_outputs: int, num_inputs: int, bits: Bits, memory: WeightMemory | None = None) -> QuantizedWeight:
    """Returns room for a weight, newly allocated, or in `memory`, where weights lie side by side. Outputs beyond
    `num_outputs`, which fill the last panel, are zero from the start."""
    group_size = GROUP_SIZES[bits]
    num_panels, num_groups = -(-num_outputs // PANEL_OUTPUTS), -(-num_inputs // group_size)
    memory = memory or WeightMemory()
    packed = memory.empty((num_panels, num_groups * group_size * bits // 8 * PANEL_OUTPUTS), torch.uint8)
    scales = memory.empty((num_panels, num_groups, PANEL_OUTPUTS), torch.bfloat16)
    if not memory.is_filled:
        packed[-1].zero_()
        scales[-1].zero_()
    return QuantizedWeight(packed, scales, num_outputs, num_inputs, bits, group_size)


def pack_rows(target: QuantizedWeight, rows: Tensor, first_output: int) -> None:
    """Quantises `rows` `[num_rows, num_inputs]` into outputs `first_output` and following of `target`."""
    native = load_extension()
    if native is None:
        quantized_reference.pack_rows(target, rows, first_output)
        return
    native.pack_rows(
        target.packed,
        target.scales,
        rows,
        first_output,
        target.num_outputs,
        target.bits,
        target.group_size,
        num_threads(),
    )


def pack_codes(
    codes: Tensor, zeros: Tensor, scales: Tensor, bits: Bits, group_size: int, memory: WeightMemory | None = None
) -> QuantizedWeight:
    """Packs codes of somebody else's. `codes`: `[num_inputs, num_outputs]` uint8; `zeros` and `scales`: `[num_groups,
    num_outputs]`, a row for every `group_size` inputs, the last of which may have fewer. `memory` as for
    `empty_weight`."""
    num_inputs, num_outputs = codes.shape
    num_groups, num_panels = scales.shape[0], -(-num_outputs // PANEL_OUTPUTS)
    if num_groups != -(-num_inputs // group_size):
        raise ValueError(f"{num_groups} groups of {group_size} do not fit {num_inputs} inputs")
    padding = (0, num_panels * PANEL_OUTPUTS - num_outputs)
    whole = F.pad(codes, (*padding, 0, num_groups * group_size - num_inputs))
    packed = (memory or WeightMemory()).empty((num_panels, whole.numel() * bits // 8 // num_panels), torch.uint8)
    quads = whole.view(-1, 4, num_panels, PANEL_OUTPUTS)
    if bits == 4:
        quads = quads[0::2] | quads[1::2] << 4
    packed.view(num_panels, -1, PANEL_OUTPUTS, 4).copy_(quads.permute(2, 0, 3, 1))
    by_panel = (num_groups, num_panels, PANEL_OUTPUTS)
    panel_scales = F.pad(scales.float(), padding).view(by_panel).transpose(0, 1).contiguous()
    panel_zeros = F.pad(zeros.bfloat16(), padding).view(by_panel).transpose(0, 1).contiguous()
    return QuantizedWeight(packed, panel_scales, num_outputs, num_inputs, bits, group_size, panel_zeros)


def dequantize(weight: QuantizedWeight, dtype: torch.dtype, begin: int = 0, end: int | None = None) -> Tensor:
    """Returns rows [begin, end) of the weight, rounded to `dtype`; `begin` is a multiple of `PANEL_OUTPUTS`."""
    end = weight.num_outputs if end is None else end
    assert begin % PANEL_OUTPUTS == 0
    first, last = begin // PANEL_OUTPUTS, -(-end // PANEL_OUTPUTS)
    packed, scales = weight.packed[first:last], weight.scales[first:last]
    zeros = None if weight.zeros is None else weight.zeros[first:last]
    native = load_extension()
    if native is None or dtype not in _NATIVE_DTYPES:
        part = replace(weight, packed=packed, scales=scales, zeros=zeros, num_outputs=end - begin)
        return quantized_reference.dequantize(part, dtype)
    out = torch.empty(end - begin, weight.num_inputs, dtype=dtype)
    native.dequantize(out, packed, scales, zeros, weight.bits, weight.group_size, num_threads())
    return out


def linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """Multiplies `[num_rows, num_inputs]` to `[num_rows, num_outputs]` of the same dtype; sums are float32.

    Few rows read the packed weights directly. For many the weights are widened to x's dtype, some at a time.
    """
    native = load_extension()
    if native is None or x.dtype not in _NATIVE_DTYPES:
        return _linear_widened(x, weight, bias)
    if x.shape[0] >= _MANY_ROWS and x.dtype is not torch.bfloat16:
        return _linear_widened(x, weight, bias)
    out = torch.empty(x.shape[0], weight.num_outputs, dtype=x.dtype)
    native.quantized_matmul(
        out, x, weight.packed, weight.scales, weight.zeros, bias, weight.bits, weight.group_size, num_threads()
    )
    return out


def _linear_widened(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    out = torch.empty(x.shape[0], weight.num_outputs, dtype=x.dtype)
    step = max(PANEL_OUTPUTS, _WIDENED_BYTES // (weight.num_inputs * x.itemsize) // PANEL_OUTPUTS * PANEL_OUTPUTS)
    for begin in range(0, weight.num_outputs, step):
        end = min(weight.num_outputs, begin + step)
        part = dequantize(weight, x.dtype, begin, end)
        out[:, begin:end] = F.linear(x, part, None if bias is None else bias[begin:end])
    return out
