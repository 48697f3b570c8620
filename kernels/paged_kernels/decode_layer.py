"""A decoder layer in two compiled calls around its attention.

The pieces are those of `packed`, `quantized` and `fused`, in the same order, and so are the results, to the bit. What
is saved is the way into and out of Python between them, which costs more than most of the pieces do when the weights
that a step reads have just pushed everything else out of the caches. Imports the extension, which must have been
built.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from paged_kernels import _native
from paged_kernels._native import Projection
from paged_kernels.packed import PackedWeight
from paged_kernels.quantized import QuantizedWeight


def projection(weight: object, bias: Tensor | None) -> Projection | None:
    """A bfloat16 linear layer as `DecodeLayer` takes it; None for weights that only oneDNN or torch multiplies with."""
    if isinstance(weight, PackedWeight) and weight.panels is not None:
        return _native.packed_projection(weight.panels, bias, weight.num_outputs, weight.num_inputs)
    if isinstance(weight, QuantizedWeight) and weight.scales.dtype is torch.bfloat16:
        return _native.quantized_projection(
            weight.packed, weight.scales, bias, weight.num_outputs, weight.num_inputs, weight.bits, weight.group_size
        )
    return None


class DecodeLayer:
    """bfloat16 on the CPU. `input_norm` and `norm` (before gate and up) are `[hidden_size]`, `query_norm` and
    `key_norm` `[head_dim]` or None."""

    def __init__(
        self,
        *,
        qkv: Projection,
        output: Projection,
        gate_up: Projection,
        down: Projection,
        input_norm: Tensor,
        norm: Tensor,
        query_norm: Tensor | None,
        key_norm: Tensor | None,
        eps: float,
        head_counts: Sequence[int],
        head_dim: int,
    ) -> None:
        """`head_counts`: of query, key and value."""
        self._qkv, self._output, self._gate_up, self._down = qkv, output, gate_up, down
        self._input_norm, self._norm = input_norm, norm
        self._query_norm, self._key_norm = query_norm, key_norm
        self._eps = eps
        self._num_kv_heads = head_counts[-1]
        self._shape = (sum(head_counts), head_dim)
        self._all_packed = all(layer.is_packed for layer in (qkv, output, gate_up, down))

    def takes(self, num_rows: int) -> bool:
        """More are computed faster piece by piece."""
        return num_rows <= _native.packed_rows() or (self._all_packed and _native.multiplies_many_packed_rows())

    def heads(self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """`x` and `residual` `[num_rows, hidden_size]`, as a layer gets them: queries, keys and values, normed and
        turned, `[num_rows, heads, head_dim]`, and the new residual. `cos` and `sin` are float32 as for `fused.rotary`.
        """
        out = torch.empty((x.shape[0], *self._shape), dtype=torch.bfloat16)
        total = x if residual is None else torch.empty_like(x)
        _native.project_heads(
            out, total, x, residual, self._input_norm, self._qkv, self._query_norm, self._key_norm, self._eps,
            cos, sin, self._num_kv_heads, torch.get_num_threads(),
        )  # fmt: skip
        return out, total

    def finish(self, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """From the attended `[num_rows, heads * head_dim]` to the layer's output and residual."""
        out, total = torch.empty_like(residual), torch.empty_like(residual)
        _native.finish_layer(
            out, total, attended, residual, self._output, self._norm, self._gate_up, self._down, self._eps,
            torch.get_num_threads(),
        )  # fmt: skip
        return out, total
