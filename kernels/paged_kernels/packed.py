"""Linear layers over bfloat16 weights on the CPU, in the order in which oneDNN reads them fastest.

Few rows are multiplied by our own kernel, which reads the same memory faster than oneDNN does, and so are many on a
matrix unit; elsewhere oneDNN multiplies many. oneDNN promises no order: for each shape it packs a known pattern, and
only if that lies where our kernels look for it are weights of this shape packed by us (`paged_kernels.onednn_order`).
Where it does not, torch gives no view of our memory, or nothing was compiled, oneDNN packs, and multiplies all.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from paged_kernels.extension import load_extension
from paged_kernels.onednn_order import INPUT_MULTIPLE, PANEL_OUTPUTS, known_order
from paged_kernels.onednn_view import opaque_view


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


def empty_weight(num_outputs: int, num_inputs: int) -> PackedWeight | None:
    """Room for a weight, for which `can_pack` holds: undefined until every row has been through `pack_rows`. None where
    only oneDNN can pack it."""
    native = load_extension()
    if native is None:
        return None
    order = known_order(num_outputs, num_inputs, torch.get_num_threads())
    if order is None:
        return None
    num_panels, padded_inputs = -(-num_outputs // PANEL_OUTPUTS), -(-num_inputs // INPUT_MULTIPLE) * INPUT_MULTIPLE
    panels = torch.empty(num_panels, padded_inputs * PANEL_OUTPUTS, dtype=torch.bfloat16)
    native.prefer_huge_pages(panels)
    view = opaque_view(panels, (num_outputs, num_inputs), order)
    if view is None:
        return None
    panels[-1].zero_()  # outputs beyond the last
    return PackedWeight(view, panels, num_outputs, num_inputs)


def pack_rows(target: PackedWeight, rows: Tensor, first_output: int) -> None:
    """Copies `[num_rows, num_inputs]` into outputs `first_output` and following of what `empty_weight` gave."""
    native = load_extension()
    assert native is not None and target.panels is not None
    native.fill_panels(target.panels, rows, first_output, target.num_outputs, torch.get_num_threads())


def pack(weight: Tensor) -> PackedWeight:
    """A packed copy of `[num_outputs, num_inputs]`, for which `can_pack` holds."""
    num_outputs, num_inputs = weight.shape
    target = empty_weight(num_outputs, num_inputs)
    if target is None:
        opaque: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
        return PackedWeight(opaque, None, num_outputs, num_inputs)
    pack_rows(target, weight, 0)
    return target


def takes_rows(num_rows: int) -> bool:
    """Whether our kernels multiply so many faster than oneDNN does: any number on a matrix unit, few elsewhere."""
    native = load_extension()
    return native is not None and (num_rows <= native.packed_rows() or native.multiplies_many_packed_rows())


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """bfloat16 `[num_rows, num_inputs]` -> `[num_rows, num_outputs]`, sums in float32."""
    native = load_extension()
    if native is None or weight.panels is None or not takes_rows(x.shape[0]):
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight.opaque, bias, "none", [], "")
        return product
    out = torch.empty(x.shape[0], weight.num_outputs, dtype=torch.bfloat16)
    native.packed_matmul(out, x, weight.panels, bias, torch.get_num_threads())
    return out
