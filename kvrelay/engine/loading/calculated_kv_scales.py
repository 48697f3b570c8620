"""Scales for an FP8 KV cache, calculated from a checkpoint's weights: the least powers of two with which no K or V of
any request overflows.

Nodes that exchange blocks need the same scales, each on its own and before the first request. Activations differ in
their last bits between processors, and so would scales measured over prompts; a function of the stored weights in
float64 is the same everywhere. The bound is Cauchy-Schwarz for a row of a projection and the normalised input, whose
length RMSNorm fixes. It exceeds typical values by about the square root of the hidden size. That costs no precision:
FP8 is a floating-point format, and keeps its three bits over four decimal orders of magnitude.
"""

import math

import torch
from paged_kernels.kv_scales import LARGEST_FP8, KVScales
from paged_kernels.prequantized_weight import dequantize
from torch import Tensor

from kvrelay.core.errors import ModelLoadError
from kvrelay.engine.layers.prequantized_linear import layer_weight
from kvrelay.engine.layers.weight_format import PrequantizedTensors
from kvrelay.engine.loading.checkpoint import Checkpoint, StoredTensor
from kvrelay.engine.loading.checkpoint_reader import read_tensor
from kvrelay.engine.models.model_config import ModelConfig

_MARGIN = 1.25  # for the rounding of weights and activations in the computation


def calculate_kv_scales(checkpoint: Checkpoint, config: ModelConfig) -> KVScales:
    """Returns scales, on the CPU, for a checkpoint that has been loaded. Raises ModelLoadError for weights that are not
    finite."""
    tensors = checkpoint.tensors()
    layers = range(config.num_layers)
    key = torch.stack([largest_keys(tensors, config, layer) for layer in layers])
    value = torch.stack([largest_values(tensors, config, layer) for layer in layers])
    return KVScales(_scales(key), _scales(value))


def largest_keys(tensors: dict[str, StoredTensor], config: ModelConfig, layer: int) -> Tensor:
    """Returns bounds that no rotated K of a head exceeds, `[num_kv_heads]` float64."""
    if config.qk_norm:
        weight = _read(tensors, f"model.layers.{layer}.self_attn.k_norm.weight")
        bounds = (weight.abs() * math.sqrt(config.head_dim)).expand(config.num_kv_heads, -1)
    else:
        bounds = _largest_projected(tensors, config, layer, "k_proj")
    first, second = bounds.chunk(2, dim=-1)  # the pairs that are rotated together
    return torch.hypot(first, second).amax(dim=-1) * config.rope.attention_factor


def largest_values(tensors: dict[str, StoredTensor], config: ModelConfig, layer: int) -> Tensor:
    """Returns bounds that no V of a head exceeds, `[num_kv_heads]` float64."""
    return _largest_projected(tensors, config, layer, "v_proj").amax(dim=-1)


def _largest_projected(tensors: dict[str, StoredTensor], config: ModelConfig, layer: int, projection: str) -> Tensor:
    """Returns bounds of a projection's outputs, `[num_kv_heads, head_dim]`: |w . x + b| is at most |w| |x| + |b|, and
    RMSNorm makes |x| at most the square root of the hidden size before it multiplies with its weight."""
    norm = _read(tensors, f"model.layers.{layer}.input_layernorm.weight")
    name = f"model.layers.{layer}.self_attn.{projection}"
    rows = _read_weight(tensors, config, name) * norm
    bounds: Tensor = torch.linalg.vector_norm(rows, dim=1) * math.sqrt(config.hidden_size)
    if config.qkv_bias:
        bounds = bounds + _read(tensors, f"{name}.bias").abs()
    return bounds.view(config.num_kv_heads, config.head_dim)


def _read_weight(tensors: dict[str, StoredTensor], config: ModelConfig, name: str) -> Tensor:
    """Reads a weight, `[num_outputs, num_inputs]`, and dequantises it if the checkpoint is quantised."""
    quantization = config.quantization
    if quantization is None or not PrequantizedTensors(quantization, frozenset(tensors)).quantizes(name):
        return _read(tensors, f"{name}.weight")
    kinds = [kind for kind in ("qweight", "qzeros", "scales", "g_idx") if f"{name}.{kind}" in tensors]
    stored = {kind: read_tensor(tensors[f"{name}.{kind}"]) for kind in kinds}
    return _finite(dequantize(layer_weight(stored, quantization, config.hidden_size)).T, f"{name}.scales")


def _read(tensors: dict[str, StoredTensor], name: str) -> Tensor:
    return _finite(read_tensor(tensors[name]).double(), name)


def _finite(weights: Tensor, name: str) -> Tensor:
    if not bool(weights.isfinite().all()):
        raise ModelLoadError(f"tensor {name} is not finite: no scales can be calculated for an FP8 KV cache")
    return weights


def _scales(largest: Tensor) -> Tensor:
    """Returns the least powers of two that can represent `largest`, 1 for what is always zero, as float32."""
    mantissa, exponent = torch.frexp(largest * (_MARGIN / LARGEST_FP8))  # mantissa * 2^exponent, mantissa in [1/2, 1)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-120, 120)  # scale and 1 / scale are normal
    return torch.ldexp(torch.ones_like(largest), torch.where(largest > 0, exponent, 0)).float()
