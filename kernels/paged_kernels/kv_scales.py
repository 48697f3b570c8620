"""What the codes of a float8_e4m3fn pool mean: a scale for each layer, K or V, and KV head.

Invariant: every backend stores x as the code nearest to x * (1 / scale), ties to even, computed in float32; what is too
large, infinities and NaN become the largest code, +-448. A code means its value times the scale.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST_FP8 = 448.0


@dataclass(frozen=True, slots=True)
class KVScales:
    """What a stored 1.0 stands for: `[num_layers, num_kv_heads]` float32 each, contiguous, on the pool's device, finite
    and above zero."""

    key: Tensor
    value: Tensor

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns the scales of K and of V, `[num_kv_heads]` each."""
        return self.key[layer], self.value[layer]


LayerScales = tuple[Tensor, Tensor] | tuple[None, None]
"""The scales of K and of V in one layer, `[num_kv_heads]` each; None for a pool that is not FP8."""


def scales_of_pool(kv_pool: Tensor, layer: int, kv_scales: KVScales | None) -> LayerScales:
    """Returns the scales of `layer`, if the pool is FP8. Raises ValueError when an FP8 pool has none."""
    if kv_pool.dtype is not FP8:
        return None, None
    if kv_scales is None:
        raise ValueError("a float8_e4m3fn pool needs kv_scales")
    return kv_scales.of_layer(layer)


def encode(x: Tensor, scale: Tensor) -> Tensor:
    """Returns `x` as codes; `scale` broadcasts against it. Plain torch, the oracle of the kernels."""
    scaled = x.float() * (1.0 / scale)
    finite = torch.where(scaled.isnan(), torch.full_like(scaled, LARGEST_FP8).copysign(scaled), scaled)
    return finite.clamp(-LARGEST_FP8, LARGEST_FP8).to(FP8)
