"""oneDNN's matrix product for weights that our kernels hold packed: the yardstick for ours."""

import torch
from paged_kernels.cpu.packed import INPUT_MULTIPLE, PANEL_OUTPUTS, PackedWeight
from torch import Tensor


def has_onednn_products() -> bool:
    """Says whether oneDNN multiplies bfloat16 on this processor, which takes AVX-512 or AVX-NE-CONVERT."""
    supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return supported


def onednn_weight(weight: PackedWeight) -> Tensor:
    """Returns a copy in the order that oneDNN chooses on this machine. It is in ordinary pages, ours in large ones."""
    pairs = weight.panels.view(weight.panels.shape[0], -1, PANEL_OUTPUTS, 2)
    padded_inputs = -(-weight.num_inputs // INPUT_MULTIPLE) * INPUT_MULTIPLE
    rows = pairs.transpose(1, 2).reshape(-1, padded_inputs)[: weight.num_outputs, : weight.num_inputs].contiguous()
    opaque: Tensor = torch.ops.mkldnn._reorder_linear_weight(rows)
    return opaque


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns `x @ weight.T + bias`. `weight` is a result of `onednn_weight`."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product
