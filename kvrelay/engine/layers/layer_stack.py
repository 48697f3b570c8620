"""All decoder layers as a stack of compiled layers, if the compiled kernels support the model."""

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The weights of one decoder layer, with its linear layers packed. `qkv` computes query, key and value, `output`
    the attention's output, and `gate_up` gate and up. `window` is how many tokens a query sees, None for all."""

    qkv: LinearLayer
    output: LinearLayer
    gate_up: LinearLayer
    down: LinearLayer
    input_norm: Tensor
    norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    window: int | None


def layer_stack(
    layers: Sequence[LayerParts],
    backend: AttentionBackend,
    *,
    final_norm: Tensor,
    eps: float,
    scale: float,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> "LayerStack | None":
    """Returns the stack, or None unless the model computes in bfloat16 on a CPU, all its linear layers can be stacked,
    the kernels were compiled, and `backend` uses them."""
    if load_extension() is None or final_norm.dtype is not torch.bfloat16 or final_norm.device.type != "cpu":
        return None
    from paged_kernels.cpu.layer_stack import LayerStack  # needs the extension
    from paged_kernels.cpu.native import NativeBackend

    stacked = [_stacked(layer) for layer in layers]
    complete = [layer for layer in stacked if layer is not None]
    if len(complete) != len(stacked) or not isinstance(backend, NativeBackend):
        return None
    return LayerStack(
        complete,
        final_norm=final_norm,
        eps=eps,
        scale=scale,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        kv_scales=backend.kv_scales,
    )


def _stacked(layer: LayerParts) -> "StackedLayer | None":
    from paged_kernels.cpu.layer_stack import StackedLayer

    qkv, output = _projection(layer.qkv), _projection(layer.output)
    gate_up, down = _projection(layer.gate_up), _projection(layer.down)
    if qkv is None or output is None or gate_up is None or down is None:
        return None
    return StackedLayer(
        qkv=qkv,
        output=output,
        gate_up=gate_up,
        down=down,
        input_norm=layer.input_norm,
        norm=layer.norm,
        query_norm=layer.query_norm,
        key_norm=layer.key_norm,
        window=layer.window,
    )


def _projection(linear: LinearLayer) -> "Projection | None":
    from paged_kernels.cpu.layer_stack import projection

    if isinstance(linear, Linear | QuantizedLinear | PrequantizedLinear):
        return projection(_weight(linear), linear.bias)
    return None


def _weight(linear: Linear | QuantizedLinear | PrequantizedLinear) -> Tensor | PackedWeight | QuantizedWeight | None:
    return linear.whole_weight if isinstance(linear, PrequantizedLinear) else linear.weight
