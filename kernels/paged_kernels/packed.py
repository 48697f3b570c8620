"""Linear layers over bfloat16 weights on the CPU, in the order in which oneDNN reads them fastest.

Many rows are multiplied by oneDNN, few by our own kernel, which reads the same memory faster than oneDNN does. oneDNN
promises no order: each weight is compared with its packed form before our kernel may read it. Where they differ, torch
gives no view of our memory, or nothing was compiled, oneDNN multiplies few rows too.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from paged_kernels.extension import load_extension
from paged_kernels.onednn_view import opaque_view

PANEL_OUTPUTS = 32
INPUT_MULTIPLE = 32


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight `[num_outputs, num_inputs]`, held once."""

    opaque: Tensor  # oneDNN's; where there are panels it reads their memory, and does not keep it alive
    panels: Tensor | None  # the same memory, `[num_panels, weights of a panel]`, where our kernel can read it
    num_outputs: int
    num_inputs: int


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN has an order of its own for such weights."""
    if dtype is not torch.bfloat16 or device.type != "cpu":
        return False
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack(weight: Tensor) -> PackedWeight:
    """A packed copy of `[num_outputs, num_inputs]`, for which `can_pack` holds."""
    num_outputs, num_inputs = weight.shape
    opaque: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    panels = _panels(opaque, weight)
    view = None if panels is None else opaque_view(panels, opaque)
    if view is None:
        return PackedWeight(opaque, None, num_outputs, num_inputs)
    return PackedWeight(view, panels, num_outputs, num_inputs)


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """bfloat16 `[num_rows, num_inputs]` -> `[num_rows, num_outputs]`, sums in float32."""
    native = load_extension()
    if native is None or weight.panels is None or x.shape[0] > native.packed_rows():
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight.opaque, bias, "none", [], "")
        return product
    out = torch.empty(x.shape[0], weight.num_outputs, dtype=torch.bfloat16)
    native.packed_matmul(out, x, weight.panels, bias, torch.get_num_threads())
    return out


def _panels(opaque: Tensor, weight: Tensor) -> Tensor | None:
    """A copy of the packed weight in large pages, or None where its order is not the one that our kernel knows."""
    native = load_extension()
    num_outputs, num_inputs = weight.shape
    num_panels, padded_inputs = -(-num_outputs // PANEL_OUTPUTS), -(-num_inputs // INPUT_MULTIPLE) * INPUT_MULTIPLE
    num_bytes: int = torch.ops.mkldnn._nbytes(opaque)
    if native is None or num_bytes != num_panels * padded_inputs * PANEL_OUTPUTS * weight.itemsize:
        return None
    panels = torch.empty(num_panels, padded_inputs * PANEL_OUTPUTS, dtype=torch.bfloat16)
    native.prefer_huge_pages(panels)
    ctypes.memmove(panels.data_ptr(), torch.ops.mkldnn.data_ptr(opaque), num_bytes)
    return panels if native.is_packed(panels, weight, torch.get_num_threads()) else None
