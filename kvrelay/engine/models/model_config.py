"""What the decoder needs to know about a checkpoint, read from its `config.json`.

Invariant: a `ModelConfig` that exists describes a model the decoder can run exactly; everything else raised
ModelLoadError naming the field.
"""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from kvrelay.core.errors import ModelLoadError
from kvrelay.engine.layers.rotary import RopeKind, RopeParameters, yarn_attention_factor
from kvrelay.engine.layers.weight_format import PublishedQuantization
from kvrelay.engine.models.quantization_config import parse_quantization

logger = logging.getLogger(__name__)

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes are counts of elements, lengths are in tokens.

    `qkv_bias`, `output_bias`, `mlp_bias`: the linear layers of attention (in, out) and of the MLP that have one.
    `qk_norm`: queries and keys are RMS-normalised per head. `sliding_windows`: one entry per layer, None where
    attention sees everything. `dtype`: what the configuration says the weights are stored in, if it says so.
    `quantization`: how they were quantised before they were published, None where they were not.
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
    quantization: PublishedQuantization | None

    @property
    def max_context_length(self) -> int:
        """The longest context the rotary embedding was made for; its stretching may reach beyond
        `max_position_embeddings`."""
        if self.rope.kind in (RopeKind.LINEAR, RopeKind.DYNAMIC):
            return int(self.max_position_embeddings * self.rope.factor)
        if self.rope.kind is RopeKind.YARN:
            return max(self.max_position_embeddings, int(self.rope.original_max_position_embeddings * self.rope.factor))
        return self.max_position_embeddings


def load_model_config(directory: Path) -> ModelConfig:
    """Reads `config.json` and, if present, `generation_config.json`. Raises ModelLoadError."""
    path = directory / "config.json"
    raw = _read_json(path)
    family = _family(raw, path)
    quantization = parse_quantization(raw.get("quantization_config"), path)
    try:
        # transformers knows each family's defaults and the older spellings of its fields.
        parsed = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        raise ModelLoadError(f"{path} can not be understood: {error}") from error
    return _convert(parsed, family, directory, quantization)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path.parent} has no {path.name}: it is not a Hugging Face model directory") from error
    except OSError as error:
        raise ModelLoadError(f"can not read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, not a {type(loaded).__name__}")
    return loaded


def _family(raw: dict[str, Any], path: Path) -> str:
    supported = ", ".join(SUPPORTED_ARCHITECTURES)
    architectures = raw.get("architectures")
    if architectures:
        known = (
            isinstance(architectures, list) and len(architectures) == 1 and architectures[0] in SUPPORTED_ARCHITECTURES
        )
        if not known:
            raise ModelLoadError(f"{path}: architectures: {architectures} is not supported; supported are {supported}")
    if raw.get("model_type") not in _FAMILIES:
        raise ModelLoadError(
            f"{path}: model_type: {raw.get('model_type')!r} is not supported; supported are {', '.join(_FAMILIES)}"
        )
    return str(raw["model_type"])


def _convert(parsed: Any, family: str, directory: Path, quantization: PublishedQuantization | None) -> ModelConfig:
    path = directory / "config.json"
    num_heads = _positive(parsed, "num_attention_heads", path)
    num_kv_heads = _positive(parsed, "num_key_value_heads", path)
    hidden_size = _positive(parsed, "hidden_size", path)
    head_dim = getattr(parsed, "head_dim", None) or hidden_size // num_heads
    if num_heads % num_kv_heads:
        raise ModelLoadError(
            f"{path}: num_attention_heads: {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    if head_dim % 2:
        raise ModelLoadError(f"{path}: head_dim: {head_dim} must be even for rotary embeddings")
    if parsed.hidden_act not in ("silu", "swish"):
        raise ModelLoadError(f"{path}: hidden_act: {parsed.hidden_act!r} is not supported; supported is 'silu'")
    attention_bias = bool(getattr(parsed, "attention_bias", False))
    return ModelConfig(
        family=family,
        hidden_size=hidden_size,
        num_layers=_positive(parsed, "num_hidden_layers", path),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=_positive(parsed, "intermediate_size", path),
        vocab_size=_positive(parsed, "vocab_size", path),
        rms_norm_eps=float(parsed.rms_norm_eps),
        rope=_rope(parsed, path),
        max_position_embeddings=_positive(parsed, "max_position_embeddings", path),
        tie_word_embeddings=bool(parsed.tie_word_embeddings),
        qkv_bias=family == "qwen2" or (family in ("llama", "qwen3") and attention_bias),
        output_bias=family in ("llama", "qwen3") and attention_bias,
        mlp_bias=family == "llama" and bool(parsed.mlp_bias),
        qk_norm=family == "qwen3",
        sliding_windows=_sliding_windows(parsed, family, path),
        eos_token_ids=_eos_token_ids(parsed, directory),
        dtype=None if parsed.dtype is None else str(parsed.dtype).removeprefix("torch."),
        quantization=quantization,
    )


def _positive(parsed: Any, field: str, path: Path) -> int:
    value = getattr(parsed, field, None)
    if not isinstance(value, int) or value < 1:
        raise ModelLoadError(f"{path}: {field}: {value!r} must be a positive integer")
    return value


def _sliding_windows(parsed: Any, family: str, path: Path) -> tuple[int | None, ...]:
    """Mistral: one window for all layers. Qwen: `layer_types`, which transformers derives from `max_window_layers` if
    it is not given. Llama has none."""
    num_layers: int = parsed.num_hidden_layers
    if family == "llama" or parsed.sliding_window is None:
        return (None,) * num_layers
    window = _positive(parsed, "sliding_window", path)
    if family == "mistral":
        return (window,) * num_layers
    kinds = parsed.layer_types
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown or len(kinds) != num_layers:
        raise ModelLoadError(
            f"{path}: layer_types: {kinds} must be full_attention or sliding_attention for each of {num_layers} layers"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(parsed: Any, path: Path) -> RopeParameters:
    fields: dict[str, Any] = parsed.rope_parameters or {}
    names = {kind.value: kind for kind in RopeKind}
    name = fields.get("rope_type", "default")
    if name not in names:
        raise ModelLoadError(f"{path}: rope_type: {name!r} is not supported; supported are {', '.join(names)}")
    if any(isinstance(value, dict) for value in fields.values()):
        raise ModelLoadError(f"{path}: rope_parameters: different rotary embeddings per layer are not supported")
    if fields.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ModelLoadError(
            f"{path}: partial_rotary_factor: {fields['partial_rotary_factor']} is not supported; supported is 1"
        )
    kind = names[name]
    if kind is RopeKind.DEFAULT:
        return RopeParameters(kind, _number(fields, "rope_theta", path), parsed.max_position_embeddings)
    return _scaled_rope(kind, fields, parsed.max_position_embeddings, path)


def _scaled_rope(kind: RopeKind, fields: dict[str, Any], max_position_embeddings: int, path: Path) -> RopeParameters:
    theta = _number(fields, "rope_theta", path)
    if kind in (RopeKind.LINEAR, RopeKind.DYNAMIC):
        return RopeParameters(kind, theta, max_position_embeddings, factor=_number(fields, "factor", path))
    trained = int(_number(fields, "original_max_position_embeddings", path))
    if kind is RopeKind.LLAMA3:
        low, high = _number(fields, "low_freq_factor", path), _number(fields, "high_freq_factor", path)
        if high <= low:
            raise ModelLoadError(f"{path}: high_freq_factor: {high} must be above low_freq_factor {low}")
        factor = _number(fields, "factor", path)
        return RopeParameters(kind, theta, trained, factor=factor, low_freq_factor=low, high_freq_factor=high)
    has_factor = fields.get("factor") is not None
    factor = _number(fields, "factor", path) if has_factor else max_position_embeddings / trained
    attention_factor = fields.get("attention_factor")
    if attention_factor is None:
        attention_factor = yarn_attention_factor(factor, fields.get("mscale"), fields.get("mscale_all_dim"))
    return RopeParameters(
        kind,
        theta,
        trained,
        factor=factor,
        attention_factor=float(attention_factor),
        beta_fast=float(fields.get("beta_fast") or 32.0),
        beta_slow=float(fields.get("beta_slow") or 1.0),
        truncate=bool(fields.get("truncate", True)),
    )


def _number(fields: dict[str, Any], field: str, path: Path) -> float:
    value = fields.get(field)
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise ModelLoadError(f"{path}: rope_parameters.{field}: {value!r} must be a positive number")
    return float(value)


def _eos_token_ids(parsed: Any, directory: Path) -> tuple[int, ...]:
    """`generation_config.json` wins: it is where chat models list the tokens that end a turn."""
    path = directory / "generation_config.json"
    value = _read_json(path).get("eos_token_id") if path.is_file() else None
    source, value = (path, value) if value is not None else (directory / "config.json", parsed.eos_token_id)
    if value is None:
        logger.warning("%s names no eos_token_id: only stop conditions and max_tokens end a request", source)
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(token_id, int) and 0 <= token_id < parsed.vocab_size for token_id in ids):
        raise ModelLoadError(
            f"{source}: eos_token_id: {value!r} must be token ids below vocab_size {parsed.vocab_size}"
        )
    return tuple(ids)
