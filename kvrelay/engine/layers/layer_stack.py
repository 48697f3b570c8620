"""All decoder layers as a stack of compiled layers, if the compiled kernels support the model."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from paged_kernels.base import AttentionBackend
from paged_kernels.cpu.extension import load_extension
from paged_kernels.cpu.packed import PackedWeight
from paged_kernels.cpu.quantized_weight import QuantizedWeight
from torch import Tensor

from kvrelay.engine.layers.linear import Linear, LinearLayer
from kvrelay.engine.layers.prequantized_linear import PrequantizedLinear
from kvrelay.engine.layers.quantized_linear import QuantizedLinear

if TYPE_CHECKING:
    from paged_kernels._native import Projection
    from paged_kernels.cpu.layer_stack import LayerStack, StackedLayer


def layer_stack(
    layers: "Iterable[StackedLayer | None]",
    backend: AttentionBackend,
    *,
    final_norm: Tensor,
    eps: float,
    scale: float,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> "LayerStack | None":
    """Returns the stack, or None unless the model computes in bfloat16 on a CPU, the kernels were compiled, `backend`
    uses them, and no layer is None. `layers` are only iterated over if the other conditions hold."""
    if load_extension() is None or final_norm.dtype is not torch.bfloat16 or final_norm.device.type != "cpu":
        return None
    from paged_kernels.cpu.layer_stack import LayerStack  # needs the extension
    from paged_kernels.cpu.native import NativeBackend

    if not isinstance(backend, NativeBackend):
        return None
    stacked: list[StackedLayer] = []
    for layer in layers:
        if layer is None:
            return None
        stacked.append(layer)
    return LayerStack(
        stacked,
        final_norm=final_norm,
        eps=eps,
        scale=scale,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        kv_scales=backend.kv_scales,
    )


def stacked_linear(linear: LinearLayer) -> "Projection | None":
    """Returns a packed linear layer as a stack takes it; None if it cannot be stacked. Needs the compiled kernels."""
    from paged_kernels.cpu.layer_stack import projection

    if isinstance(linear, Linear | QuantizedLinear | PrequantizedLinear):
        return projection(_weight(linear), linear.bias)
    return None


def _weight(linear: Linear | QuantizedLinear | PrequantizedLinear) -> Tensor | PackedWeight | QuantizedWeight | None:
    return linear.whole_weight if isinstance(linear, PrequantizedLinear) else linear.weight
