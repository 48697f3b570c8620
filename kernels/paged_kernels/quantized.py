"""Linear layers over weights of 8 or 4 bits: compiled on the CPU where that was built, plain torch otherwise.

Weight-only quantisation to nearest: activations keep their type, each output has a bfloat16 scale per group of inputs,
and no calibration is needed. Both ways give the same packed bytes. The packed format is in `csrc/quantized.h`.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_kernels import quantized_reference
from paged_kernels.extension import load_extension

PANEL_OUTPUTS = 16
GROUP_SIZES: dict[int, int] = {8: 128, 4: 64}
"""Inputs that share a scale, by bits: 8.125 and 4.25 bits per weight in all."""

_NATIVE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MANY_ROWS = 64  # so many are faster with weights that were widened once, by a matrix library where we have no kernel
_WIDENED_BYTES = 1 << 20  # of weights widened at a time, so that they stay in the cache

Bits = Literal[8, 4]


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight `[num_outputs, num_inputs]` in packed form. Undefined until every row has been through `pack_rows`."""

    packed: Tensor  # [num_panels, bytes of a panel] uint8
    scales: Tensor  # [num_panels, num_groups, 16] bfloat16
    num_outputs: int
    num_inputs: int
    bits: Bits
    group_size: int

    @property
    def num_bytes(self) -> int:
        return self.packed.nbytes + self.scales.nbytes


def empty_weight(num_outputs: int, num_inputs: int, bits: Bits) -> QuantizedWeight:
    """Room for a weight, in RAM. Outputs beyond `num_outputs`, which fill the last panel, are zero from the start."""
    group_size = GROUP_SIZES[bits]
    num_panels, num_groups = -(-num_outputs // PANEL_OUTPUTS), -(-num_inputs // group_size)
    packed = torch.empty(num_panels, num_groups * group_size * bits // 8 * PANEL_OUTPUTS, dtype=torch.uint8)
    scales = torch.empty(num_panels, num_groups, PANEL_OUTPUTS, dtype=torch.bfloat16)
    native = load_extension()
    if native is not None:
        native.prefer_huge_pages(packed.view(torch.bfloat16))
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
        torch.get_num_threads(),
    )


def dequantize(weight: QuantizedWeight, dtype: torch.dtype, begin: int = 0, end: int | None = None) -> Tensor:
    """Rows [begin, end) of the weight, rounded to `dtype`; `begin` is a multiple of 16."""
    end = weight.num_outputs if end is None else end
    assert begin % PANEL_OUTPUTS == 0
    first, last = begin // PANEL_OUTPUTS, -(-end // PANEL_OUTPUTS)
    packed, scales = weight.packed[first:last], weight.scales[first:last]
    native = load_extension()
    if native is None or dtype not in _NATIVE_DTYPES:
        part = QuantizedWeight(packed, scales, end - begin, weight.num_inputs, weight.bits, weight.group_size)
        return quantized_reference.dequantize(part, dtype)
    out = torch.empty(end - begin, weight.num_inputs, dtype=dtype)
    native.dequantize(out, packed, scales, weight.bits, weight.group_size, torch.get_num_threads())
    return out


def linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """`[num_rows, num_inputs]` -> `[num_rows, num_outputs]` of the same dtype, sums in float32.

    Few rows read the packed weights directly. For many the weights are widened to x's dtype, some at a time.
    """
    native = load_extension()
    if native is None or x.dtype not in _NATIVE_DTYPES:
        return _linear_widened(x, weight, bias)
    if x.shape[0] >= _MANY_ROWS and not (x.dtype == torch.bfloat16 and native.multiplies_many_rows()):
        return _linear_widened(x, weight, bias)
    out = torch.empty(x.shape[0], weight.num_outputs, dtype=x.dtype)
    native.quantized_matmul(
        out, x, weight.packed, weight.scales, bias, weight.bits, weight.group_size, torch.get_num_threads()
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
