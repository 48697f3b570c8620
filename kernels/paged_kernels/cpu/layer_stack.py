"""All layers of a decoder compiled, their attention and the last norm included: one call per step.

The pieces are those of `packed`, `quantized`, `fused` and `native`, in the same order, and so are the results, to the
bit. What is saved is the way into and out of Python around each of them, which costs more than most of the pieces do,
and with it the moments at which another thread of the process takes the interpreter away in the middle of a step.
Imports the extension, which must have been built.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paged_kernels import _native
from paged_kernels._native import Projection
from paged_kernels.base import AttentionMetadata, LastTokens
from paged_kernels.cpu.packed import PackedWeight
from paged_kernels.cpu.quantized_weight import QuantizedWeight
from paged_kernels.cpu.threads import num_threads
from paged_kernels.kv_scales import KVScales


def projection(weight: Tensor | PackedWeight | QuantizedWeight | None, bias: Tensor | None) -> Projection | None:
    """Returns a linear layer with bfloat16 inputs in the form that a stack takes; None for weights that only torch can
    multiply with, and for none."""
    if isinstance(weight, PackedWeight):
        return _native.packed_projection(weight.panels, bias, weight.num_outputs, weight.num_inputs)
    if isinstance(weight, QuantizedWeight):
        return _native.quantized_projection(
            weight.packed, weight.scales, weight.zeros, bias, weight.num_outputs, weight.num_inputs, weight.bits,
            weight.group_size,
        )  # fmt: skip
    return None


@dataclass(frozen=True, slots=True)
class StackedLayer:
    """The weights of one decoder layer. `input_norm` and `norm` (before gate and up) are `[hidden_size]`, `query_norm`
    and `key_norm` `[head_dim]` or None. `window` is the number of tokens that a query sees, itself included; None is
    all."""

    qkv: Projection
    output: Projection
    gate_up: Projection
    down: Projection
    input_norm: Tensor
    norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    window: int | None


class LayerStack:
    """The layers of a bfloat16 decoder on the CPU. The pool is bfloat16, too, or FP8 with `kv_scales`."""

    def __init__(
        self,
        layers: Sequence[StackedLayer],
        *,
        final_norm: Tensor,
        eps: float,
        scale: float,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        kv_scales: KVScales | None,
    ) -> None:
        """`scale` multiplies the attention's scores. Raises ValueError for layers that do not fit together."""
        self._kv_scales = kv_scales
        self._stack = _native.LayerStack(final_norm, eps, scale, num_heads, num_kv_heads, head_dim)
        for layer in layers:
            self._stack.add(
                qkv=layer.qkv, output=layer.output, gate_up=layer.gate_up, down=layer.down, input_norm=layer.input_norm,
                norm=layer.norm, query_norm=layer.query_norm, key_norm=layer.key_norm, window=layer.window or 0,
            )  # fmt: skip

    def __call__(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv_pool: Tensor,
        metadata: AttentionMetadata,
        last: LastTokens | None,
    ) -> Tensor:
        """Computes all layers and the last norm of the embedded tokens `x` `[num_tokens, hidden_size]`, in place, and
        returns the rows of `last`, which are the first ones of `x` then, or all rows. Writes the KV of all tokens into
        the pool. `cos` and `sin` are float32 as for `fused.rotary`. Raises what the attention backend raises."""
        is_fp8 = kv_pool.dtype is torch.float8_e4m3fn
        if is_fp8 and self._kv_scales is None:
            raise ValueError("a float8_e4m3fn pool needs kv_scales")
        scales = self._kv_scales if is_fp8 else None
        self._stack.run(
            x, cos, sin, kv_pool.view(torch.uint8) if is_fp8 else kv_pool, metadata, last,
            None if scales is None else scales.key, None if scales is None else scales.value, num_threads(),
        )  # fmt: skip
        return x if last is None else x[: len(last.rows)]
