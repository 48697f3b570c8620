"""The configuration of a decoder, read from a checkpoint's `config.json`.

Invariant: a `ModelConfig` that exists describes a model that the decoder can run exactly. Everything else raises
ModelLoadError, which names the field.
"""

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrelay.core.errors import ModelLoadError
from kvrelay.core.model.json_object import read_json_object
from kvrelay.engine.layers.rotary import RopeKind, RopeParameters, yarn_attention_factor
from kvrelay.engine.layers.weight_format import CheckpointQuantization
from kvrelay.engine.loading.config_json import MOST_LAYERS, complete_config, read_config
from kvrelay.engine.loading.quantization_config import parse_quantization

_DUAL_CHUNKS = "dual_chunk_attention_config"
_MOST_POSITIONS = 2**24  # float32, in which rotary angles are computed, counts no further
_TURNS = {"least": 1 / _MOST_POSITIONS, "most": _MOST_POSITIONS}  # so that the logarithms of YaRN stay finite
# Far above those of any model, and so small that the size of no tensor overflows.
_MOST_ELEMENTS = 2**20
_MOST = {
    "num_hidden_layers": MOST_LAYERS,
    "head_dim": 2**12,
    "vocab_size": 2**24,
    "max_position_embeddings": _MOST_POSITIONS,
    "sliding_window": 2**31 - 1,
}

_ROPE_FIELDS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_ROPE_FIELDS_OF = {
    RopeKind.DEFAULT: set[str](),
    RopeKind.LINEAR: {"factor"},
    RopeKind.DYNAMIC: {"factor"},
    RopeKind.LLAMA3: {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    RopeKind.YARN: {
        *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate"),
    },
}
"""The fields of `rope_parameters` that are read, of every kind and of each one."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The configuration of a decoder. Sizes are counts of elements, lengths are in tokens.

    `qkv_bias`, `output_bias` and `mlp_bias` tell which linear layers have a bias: those before attention, the one after
    it, and those of the MLP. With `qk_norm`, queries and keys are RMS-normalised per head. `sliding_windows` has one
    entry per layer, None for attention over all tokens. `dtype` is the configuration's own statement about the stored
    weights, if it has one. `quantization` is how the checkpoint was quantised before it was published, if it was.
    """

    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeParameters
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...]
    dtype: str | None
    quantization: CheckpointQuantization | None

    @property
    def max_context_length(self) -> int:
        """Returns the longest context that the rotary embedding allows. If it is stretched, that may be more than
        `max_position_embeddings`."""
        length: float = self.max_position_embeddings
        if self.rope.kind in (RopeKind.LINEAR, RopeKind.DYNAMIC):
            length *= self.rope.factor
        elif self.rope.kind is RopeKind.YARN:
            length = max(length, self.rope.original_max_position_embeddings * self.rope.factor)
        return int(min(length, _MOST_POSITIONS))


def load_model_config(directory: Path) -> ModelConfig:
    """Reads `config.json` and, if present, `generation_config.json`. Raises ModelLoadError."""
    path = directory / "config.json"
    raw, family = read_config(path)
    quantization = parse_quantization(raw.get("quantization_config"), path)
    return _convert(complete_config(raw, family, path), family, directory, quantization)


def _convert(
    parsed: Mapping[str, Any], family: str, directory: Path, quantization: CheckpointQuantization | None
) -> ModelConfig:
    path = directory / "config.json"
    num_heads = _positive(parsed, "num_attention_heads", path)
    num_kv_heads = _positive(parsed, "num_key_value_heads", path)
    hidden_size = _positive(parsed, "hidden_size", path)
    head_dim = _head_dim(parsed, hidden_size, num_heads, path)
    if num_heads % num_kv_heads:
        raise ModelLoadError(
            f"{path}: num_attention_heads: {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    if head_dim % 2:
        raise ModelLoadError(f"{path}: head_dim: {head_dim} must be even for rotary embeddings")
    if parsed["hidden_act"] not in ("silu", "swish"):
        raise ModelLoadError(f"{path}: hidden_act: {parsed['hidden_act']!r} is not supported; supported is 'silu'")
    if not parsed["is_causal"]:  # which transformers takes for attention in both directions
        raise ModelLoadError(f"{path}: is_causal: {parsed['is_causal']} is not supported; supported is true")
    attention_bias = family in ("llama", "qwen3") and _switch(parsed, "attention_bias", path)
    max_positions = _exact_positions(parsed, path)
    rope = _rope(parsed["rope_parameters"], max_positions, head_dim, path)
    if parsed.get(_DUAL_CHUNKS) is not None and rope.kind is not RopeKind.DEFAULT:
        raise ModelLoadError(f"{path}: {_DUAL_CHUNKS} is not supported together with a rope_type of {rope.kind.value}")
    return ModelConfig(
        family=family,
        hidden_size=hidden_size,
        num_layers=_positive(parsed, "num_hidden_layers", path),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=_positive(parsed, "intermediate_size", path),
        vocab_size=_positive(parsed, "vocab_size", path),
        rms_norm_eps=_epsilon(parsed["rms_norm_eps"], path),
        rope=rope,
        max_position_embeddings=max_positions,
        tie_word_embeddings=_switch(parsed, "tie_word_embeddings", path),
        qkv_bias=family == "qwen2" or attention_bias,
        output_bias=attention_bias,
        mlp_bias=family == "llama" and _switch(parsed, "mlp_bias", path),
        qk_norm=family == "qwen3",
        sliding_windows=_sliding_windows(parsed, family, path),
        eos_token_ids=_eos_token_ids(parsed, directory),
        dtype=None if parsed["dtype"] is None else str(parsed["dtype"]).removeprefix("torch."),
        quantization=quantization,
    )


def _exact_positions(parsed: Mapping[str, Any], path: Path) -> int:
    """Returns how many positions the model has. With dual chunk attention (An et al. 2024, arXiv:2402.17463, section
    3.2; Qwen2.5-1M) these are those of its first chunk: within it, it is attention as any other, and beyond it
    distances are others than their tokens have."""
    most = _positive(parsed, "max_position_embeddings", path)
    chunks = parsed.get(_DUAL_CHUNKS)
    if chunks is None:
        return most
    if not isinstance(chunks, dict):
        raise ModelLoadError(f"{path}: {_DUAL_CHUNKS}: {chunks!r} must be an object")
    exact = min(most, _positive(chunks, "chunk_size", path))
    if chunks.get("original_max_position_embeddings") is not None:
        exact = min(exact, _positive(chunks, "original_max_position_embeddings", path))
    if exact < most:
        _logger.warning(
            "%s: %s is not supported: at most %d of its %d positions are served", path, _DUAL_CHUNKS, exact, most
        )
    return exact


def _positive(parsed: Mapping[str, Any], field: str, path: Path) -> int:
    value = parsed.get(field)
    most = _MOST.get(field, _MOST_ELEMENTS)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ModelLoadError(f"{path}: {field}: {value!r} must be a positive integer of at most {most}")
    return value


def _switch(parsed: Mapping[str, Any], field: str, path: Path) -> bool:
    value = parsed[field]
    if not isinstance(value, bool):
        raise ModelLoadError(f"{path}: {field}: {value!r} must be true or false")
    return value


def _epsilon(value: Any, path: Path) -> float:
    if not isinstance(value, float) or not 0 < value < 1:
        raise ModelLoadError(f"{path}: rms_norm_eps: {value!r} must be a number between 0 and 1")
    return value


def _head_dim(parsed: Mapping[str, Any], hidden_size: int, num_heads: int, path: Path) -> int:
    if parsed["head_dim"] is not None:
        return _positive(parsed, "head_dim", path)
    if hidden_size % num_heads:
        raise ModelLoadError(f"{path}: hidden_size: {hidden_size} is not a multiple of num_attention_heads {num_heads}")
    return hidden_size // num_heads


def _sliding_windows(parsed: Mapping[str, Any], family: str, path: Path) -> tuple[int | None, ...]:
    """Returns the window of each layer: of those that `layer_types` says, without it of all. Llama's have none: in
    transformers one would hold while decoding, but not within a prompt."""
    num_layers: int = parsed["num_hidden_layers"]
    window, kinds = parsed["sliding_window"], parsed.get("layer_types")
    if kinds is None:
        kinds = ["full_attention" if window is None else "sliding_attention"] * num_layers
    known = isinstance(kinds, list) and all(kind in ("full_attention", "sliding_attention") for kind in kinds)
    if not known or len(kinds) != num_layers:
        raise ModelLoadError(
            f"{path}: layer_types: {kinds} must be full_attention or sliding_attention for each of {num_layers} layers"
        )
    longest: int = parsed["max_position_embeddings"]
    holds_all = family == "llama" and isinstance(window, int) and window >= longest
    if "sliding_attention" not in kinds or holds_all:
        return (None,) * num_layers
    if family == "llama":
        raise ModelLoadError(
            f"{path}: sliding_window: {window!r} is not supported for llama; supported is null, or at least "
            f"max_position_embeddings ({longest})"
        )
    if window is None:
        raise ModelLoadError(f"{path}: layer_types: sliding_attention needs a sliding_window that is not switched off")
    window = _positive(parsed, "sliding_window", path)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(fields: dict[str, Any], max_positions: int, head_dim: int, path: Path) -> RopeParameters:
    names = {kind.value: kind for kind in RopeKind}
    name = fields.get("rope_type", "default")
    if not isinstance(name, str) or name not in names:
        raise ModelLoadError(f"{path}: rope_type: {name!r} is not supported; supported are {', '.join(names)}")
    if any(isinstance(value, dict) for value in fields.values()):
        raise ModelLoadError(f"{path}: rope_parameters: different rotary embeddings per layer are not supported")
    if fields.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ModelLoadError(
            f"{path}: partial_rotary_factor: {fields['partial_rotary_factor']} is not supported; supported is 1"
        )
    kind = names[name]
    given = {field for field, value in fields.items() if value is not None}
    if ignored := sorted(given - _ROPE_FIELDS - _ROPE_FIELDS_OF[kind]):  # as transformers does, but others may not
        _logger.warning("%s: rope_parameters: %s: not read with rope_type %s", path, ", ".join(ignored), name)
    if kind is RopeKind.DEFAULT:
        return RopeParameters(kind, _number(fields, "rope_theta", path), max_positions)
    if kind is RopeKind.DYNAMIC and head_dim == 2:  # theta grows by a power with the divisor head_dim - 2
        raise ModelLoadError(f"{path}: head_dim: 2 is too small for the rope_type dynamic, which needs 4 or more")
    return _scaled_rope(kind, fields, max_positions, path)


def _scaled_rope(kind: RopeKind, fields: dict[str, Any], max_positions: int, path: Path) -> RopeParameters:
    theta = _number(fields, "rope_theta", path)
    if kind in (RopeKind.LINEAR, RopeKind.DYNAMIC):
        return RopeParameters(kind, theta, max_positions, factor=_number(fields, "factor", path))
    length = _number(fields, "original_max_position_embeddings", path, least=1, most=_MOST_POSITIONS)
    trained = int(length)
    if trained != length:
        raise ModelLoadError(f"{path}: rope_parameters.original_max_position_embeddings: {length} must be an integer")
    if kind is RopeKind.LLAMA3:
        low, high = _number(fields, "low_freq_factor", path), _number(fields, "high_freq_factor", path)
        if high <= low:
            raise ModelLoadError(f"{path}: high_freq_factor: {high} must be above low_freq_factor {low}")
        factor = _number(fields, "factor", path)
        return RopeParameters(kind, theta, trained, factor=factor, low_freq_factor=low, high_freq_factor=high)
    if theta == 1.0:  # YaRN divides by its logarithm
        raise ModelLoadError(f"{path}: rope_parameters.rope_theta: {fields['rope_theta']!r} must not be 1 for yarn")
    has_factor = fields.get("factor") is not None
    factor = _number(fields, "factor", path) if has_factor else max_positions / trained
    if fields.get("attention_factor") is not None:
        attention_factor = _number(fields, "attention_factor", path)
    else:
        mscale, mscale_all_dim = (_number_or(0.0, fields, name, path) for name in ("mscale", "mscale_all_dim"))
        attention_factor = yarn_attention_factor(factor, mscale, mscale_all_dim)
    return RopeParameters(
        kind,
        theta,
        trained,
        factor=factor,
        attention_factor=attention_factor,
        beta_fast=_number_or(32.0, fields, "beta_fast", path, **_TURNS),
        beta_slow=_number_or(1.0, fields, "beta_slow", path, **_TURNS),
        truncate=bool(fields.get("truncate", True)),
    )


def _number(
    fields: dict[str, Any], field: str, path: Path, *, least: float = 0.0, most: float = sys.float_info.max
) -> float:
    value = fields.get(field)
    if not isinstance(value, int | float) or isinstance(value, bool) or not (value > 0 and least <= value <= most):
        limits = f" between {least} and {most}" if least else ""
        raise ModelLoadError(f"{path}: rope_parameters.{field}: {value!r} must be a positive number{limits}")
    return float(value)


def _number_or(default: float, fields: dict[str, Any], field: str, path: Path, **limits: float) -> float:
    """Returns a number, or `default` for one that is missing or 0, as transformers does. `limits` are those of
    `_number`."""
    return _number(fields, field, path, **limits) if fields.get(field) else default


def _eos_token_ids(parsed: Mapping[str, Any], directory: Path) -> tuple[int, ...]:
    """Returns the end-of-sequence tokens. `generation_config.json` takes precedence: chat models list there which
    tokens end a turn."""
    path = directory / "generation_config.json"
    value = read_json_object(path).get("eos_token_id") if path.is_file() else None
    source, value = (path, value) if value is not None else (directory / "config.json", parsed["eos_token_id"])
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(type(token_id) is int and 0 <= token_id < parsed["vocab_size"] for token_id in ids):
        raise ModelLoadError(
            f"{source}: eos_token_id: {value!r} must be token ids below vocab_size {parsed['vocab_size']}"
        )
    return tuple(ids)
