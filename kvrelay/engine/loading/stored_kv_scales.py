"""The scales of an FP8 KV cache that a checkpoint contains, as calibration tools publish them.

A layer has one tensor for K and one for V, each of one value or of one value per KV head. Invariant: the scales are
finite, normal float32 values above zero, for all layers or for none.
"""

import re
from collections.abc import Mapping, Sequence

import torch
from paged_kernels.kv_scales import KVScales
from torch import Tensor

from kvrelay.core.errors import ModelLoadError
from kvrelay.engine.loading.checkpoint import Checkpoint, StoredTensor
from kvrelay.engine.loading.checkpoint_reader import read_tensor
from kvrelay.engine.models.model_config import ModelConfig

# Names under model.layers.N.self_attn, in the order in which they are looked for: those of compressed-tensors and
# AutoFP8, of vLLM, of ModelOpt, and the older name of one scale for both K and V.
_KEY_NAMES = ("k_scale", "attn.k_scale", "k_proj.k_scale", "kv_scale")
_VALUE_NAMES = ("v_scale", "attn.v_scale", "v_proj.v_scale", "kv_scale")
_LEAST = torch.finfo(torch.float32).tiny  # K and V are multiplied by 1 / scale, which may be infinite for less
_ANY_NAME = re.compile(
    r"model\.layers\.\d+\.self_attn\.(" + "|".join(map(re.escape, sorted({*_KEY_NAMES, *_VALUE_NAMES}))) + ")"
)


def is_kv_scale(name: str) -> bool:
    """Tells whether a tensor of this name is a scale of an FP8 KV cache."""
    return _ANY_NAME.fullmatch(name) is not None


def stored_kv_scales(checkpoint: Checkpoint, config: ModelConfig) -> KVScales | None:
    """Returns the checkpoint's scales, on the CPU, or None if it has none. Raises ModelLoadError, which names the
    tensor."""
    tensors = checkpoint.tensors()
    if not any(map(is_kv_scale, tensors)):
        return None
    layers = range(config.num_layers)
    key = torch.stack([_of_heads(tensors, layer, _KEY_NAMES, config.num_kv_heads) for layer in layers])
    value = torch.stack([_of_heads(tensors, layer, _VALUE_NAMES, config.num_kv_heads) for layer in layers])
    return KVScales(key, value)


def _of_heads(tensors: Mapping[str, StoredTensor], layer: int, endings: Sequence[str], num_kv_heads: int) -> Tensor:
    """Returns the scales of a layer's heads, `[num_kv_heads]` float32. Raises ModelLoadError."""
    names = [f"model.layers.{layer}.self_attn.{ending}" for ending in endings]
    name = next((name for name in names if name in tensors), None)
    if name is None:
        raise ModelLoadError(f"tensor {names[0]} is missing, though other layers have scales for an FP8 KV cache")
    stored = read_tensor(tensors[name]).float()
    if stored.numel() not in (1, num_kv_heads):
        raise ModelLoadError(
            f"tensor {name} has shape {list(stored.shape)}, not one value or one per KV head ({num_kv_heads})"
        )
    if not bool((stored.isfinite() & (stored >= _LEAST)).all()):
        raise ModelLoadError(f"tensor {name} must be finite and at least {_LEAST:.3g}, not {stored.flatten().tolist()}")
    return stored.flatten().expand(num_kv_heads)
