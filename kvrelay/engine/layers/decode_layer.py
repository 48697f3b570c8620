"""The linear layers and norms of a decoder layer as one compiled layer, where that can be had."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from paged_kernels.extension import load_extension
from torch import Tensor

from kvrelay.engine.layers.linear import Linear, LinearLayer
from kvrelay.engine.layers.quantized_linear import QuantizedLinear

if TYPE_CHECKING:
    from paged_kernels.decode_layer import DecodeLayer


def decode_layer(
    linears: Sequence[LinearLayer],
    *,
    input_norm: Tensor,
    norm: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
    head_counts: Sequence[int],
    head_dim: int,
) -> "DecodeLayer | None":
    """`linears`: packed, those of the heads, of the attention's output, of gate and up, and of down. None unless all is
    bfloat16 on the CPU, or quantised there, and the kernels were compiled."""
    if load_extension() is None or input_norm.dtype is not torch.bfloat16 or input_norm.device.type != "cpu":
        return None
    from paged_kernels.decode_layer import DecodeLayer, projection  # needs the extension

    made = [
        projection(linear.weight, linear.bias) if isinstance(linear, Linear | QuantizedLinear) else None
        for linear in linears
    ]
    qkv, output, gate_up, down = made
    if qkv is None or output is None or gate_up is None or down is None:
        return None
    return DecodeLayer(
        qkv=qkv,
        output=output,
        gate_up=gate_up,
        down=down,
        input_norm=input_norm,
        norm=norm,
        query_norm=query_norm,
        key_norm=key_norm,
        eps=eps,
        head_counts=head_counts,
        head_dim=head_dim,
    )
