"""What `quantized.py` computes, in plain torch: its fallback and its oracle. See there for shapes."""

import torch
from torch import Tensor

from paged_kernels.cpu.quantized_weight import PANEL_OUTPUTS, QuantizedWeight

_SMALLEST_SCALE = 2.0**-126  # smaller ones have no finite inverse


def quantize(rows: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor]:
    """Returns integers `[num_rows, num_groups, group_size]` int16 and scales `[num_rows, num_groups]` bfloat16 of
    `rows` `[num_rows, num_inputs]`, padded with zeros to whole groups.

    With 8 bits the integers are -127 .. 127. With 4 bits a group's element of the largest magnitude becomes -8, so that
    all sixteen values are used; its scale may be negative.
    """
    num_groups = -(-rows.shape[1] // group_size)
    padding = num_groups * group_size - rows.shape[1]
    groups = torch.nn.functional.pad(rows.float(), (0, padding)).view(rows.shape[0], num_groups, group_size)
    extreme = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))
    exact = extreme.abs() / 127 if bits == 8 else extreme / -8
    scales = torch.where(exact.abs() < _SMALLEST_SCALE, 0.0, exact).bfloat16()
    inverse = torch.where(scales == 0, 0.0, 1 / scales.float())
    lowest, highest = (-127, 127) if bits == 8 else (-8, 7)
    integers = (groups * inverse).round().clamp(lowest, highest).to(torch.int16)
    return integers, scales.squeeze(2)


def pack_rows(target: QuantizedWeight, rows: Tensor, first_output: int) -> None:
    integers, scales = quantize(rows, target.bits, target.group_size)
    codes = (integers + (128 if target.bits == 8 else 8)).to(torch.uint8).view(rows.shape[0], -1, 4)
    if target.bits == 4:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    outputs = torch.arange(first_output, first_output + rows.shape[0])
    panels, lanes = outputs // PANEL_OUTPUTS, outputs % PANEL_OUTPUTS
    target.packed.view(target.packed.shape[0], -1, PANEL_OUTPUTS, 4)[panels, :, lanes] = codes
    target.scales[panels, :, lanes] = scales


def dequantize(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """Returns the weights, computed in float32 (float64 for float64) and rounded to `dtype`."""
    codes = weight.packed.view(weight.packed.shape[0], -1, PANEL_OUTPUTS, 4)
    if weight.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=2).flatten(1, 2)
    zeros: Tensor | float = 128.0 if weight.bits == 8 else 8.0
    if weight.zeros is not None:
        zeros = weight.zeros.transpose(1, 2).float().repeat_interleave(weight.group_size, dim=2)
    integers = codes.permute(0, 2, 1, 3).flatten(2) - zeros  # [num_panels, PANEL_OUTPUTS, num_inputs]
    scales = weight.scales.transpose(1, 2).float().repeat_interleave(weight.group_size, dim=2)
    wide = (integers * scales).flatten(0, 1)
    return wide[: weight.num_outputs, : weight.num_inputs].to(dtype)
