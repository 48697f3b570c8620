"""bfloat16 weights packed by hand, in plain torch, and our kernel over such weights."""

import torch
from paged_kernels.cpu.extension import load_extension
from paged_kernels.cpu.packed import INPUT_MULTIPLE, PANEL_OUTPUTS, PackedWeight
from paged_kernels.cpu.threads import num_threads
from torch import Tensor


def by_hand(weight: Tensor) -> PackedWeight:
    return PackedWeight(panels_of(weight), *weight.shape)


def panels_of(weight: Tensor) -> Tensor:
    num_outputs, num_inputs = weight.shape
    pad = (0, -num_inputs % INPUT_MULTIPLE, 0, -num_outputs % PANEL_OUTPUTS)
    rows = torch.nn.functional.pad(weight, pad)
    panels = rows.reshape(rows.shape[0] // PANEL_OUTPUTS, PANEL_OUTPUTS, rows.shape[1] // 2, 2).transpose(1, 2)
    return panels.reshape(panels.shape[0], -1)


def multiply(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Multiplies with our kernel, whatever the number of rows."""
    native = load_extension()
    assert native is not None
    out = torch.full((x.shape[0], weight.num_outputs), float("nan"), dtype=torch.bfloat16)
    native.packed_matmul(out, x, weight.panels, bias, num_threads())
    return out
