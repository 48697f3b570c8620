"""A checkpoint's `config.json`, completed with the defaults of its family and with older spellings translated.

Both are defined by classes of transformers (LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config; 5.x). This module has
them as tables, because importing that library takes longer than the rest of a node's start without the weights. No
torch here, so that `kvrelay serve` can refuse a model before it starts a node.
Invariant: every field has the value that it has in a model of AutoModelForCausalLM;
`tests/engine/loading/test_config_json.py` compares them.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvrelay.core.errors import ModelLoadError
from kvrelay.core.model.directory import refuse_dangling
from kvrelay.core.model.json_object import read_json_object

_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,  # as many as there are heads
        "head_dim": None,  # hidden_size / num_attention_heads
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "is_causal": True,
        "sliding_window": None,
        "eos_token_id": None,
        "dtype": None,
    }
)
_QWEN: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "layer_types": None,
    }
)
_FAMILIES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama": {
            "vocab_size": 32000,
            "intermediate_size": 11008,
            "max_position_embeddings": 2048,
            "eos_token_id": 2,
        },
        "mistral": {
            "vocab_size": 32000,
            "intermediate_size": 14336,
            "max_position_embeddings": 4096 * 32,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "layer_types": None,
            "eos_token_id": 2,
        },
        "qwen2": _QWEN,
        "qwen3": {**_QWEN, "head_dim": 128},
    }
)
FAMILIES = tuple(_FAMILIES)
SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
MOST_LAYERS = 2**12
_DEFAULT_THETA = 10_000.0
# Files of what people try to serve and kvrelay cannot, and what to do instead.
_NO_MODELS = (
    ("adapter_config.json", "a LoRA adapter is no model: merge it into its base model and take the result"),
    ("*.gguf", "GGUF is not supported: take the model's directory with safetensors files"),
)


def read_config(path: Path) -> tuple[dict[str, Any], str]:
    """Returns what a `config.json` holds, and the family of its model. Raises ModelLoadError if it cannot be read, or
    its model is of no family that is supported."""
    if not path.exists():
        refuse_dangling(path)
        for pattern, remedy in _NO_MODELS:
            if found := sorted(path.parent.glob(pattern)):
                raise ModelLoadError(f"{path.parent} has no config.json, but {found[0].name}: {remedy}")
    raw = read_json_object(path)
    architectures = raw.get("architectures")
    if architectures:
        known = (
            isinstance(architectures, list) and len(architectures) == 1 and architectures[0] in SUPPORTED_ARCHITECTURES
        )
        if not known:
            supported = ", ".join(SUPPORTED_ARCHITECTURES)
            raise ModelLoadError(f"{path}: architectures: {architectures} is not supported; supported are {supported}")
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ModelLoadError(f"{path}: model_type: {family!r} is not supported; supported are {', '.join(FAMILIES)}")
    return raw, str(family)


def complete_config(raw: Mapping[str, Any], family: str, path: Path) -> dict[str, Any]:
    """Returns `raw` with the defaults of its `family`, and with everything about the rotary embedding in
    `rope_parameters`. The caller checks the types of most fields. Raises ModelLoadError for layers of different
    sizes."""
    if raw.get("per_layer_config") is not None:
        raise ModelLoadError(f"{path}: per_layer_config: layers of different sizes are not supported")
    fields = {**_DEFAULTS, **_FAMILIES[family], **raw}
    if fields["dtype"] is None:
        fields["dtype"] = raw.get("torch_dtype")
    if fields["num_key_value_heads"] is None:
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    if family in ("qwen2", "qwen3"):
        _complete_windows(fields, path)
    fields["rope_parameters"] = _rope_parameters(fields, raw, path)
    return fields


def _complete_windows(fields: dict[str, Any], path: Path) -> None:
    """Sets the windows of Qwen's layers: off unless `use_sliding_window`, and then on from layer `max_window_layers`
    on."""
    if not isinstance(fields["use_sliding_window"], bool):
        raise ModelLoadError(f"{path}: use_sliding_window: {fields['use_sliding_window']!r} must be true or false")
    if not fields["use_sliding_window"]:
        fields["sliding_window"] = None
    layers, first = fields["num_hidden_layers"], fields["max_window_layers"]
    if fields["layer_types"] is None and isinstance(layers, int) and layers <= MOST_LAYERS:
        if not isinstance(first, int):
            raise ModelLoadError(f"{path}: max_window_layers: {first!r} must be an integer")
        is_sliding = [fields["sliding_window"] is not None and layer >= first for layer in range(layers)]
        fields["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in is_sliding]


def _rope_parameters(fields: Mapping[str, Any], raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise ModelLoadError(f"{path}: rope_parameters: {given!r} must be an object")
    rope = {"rope_type": given.get("type", "default"), "rope_theta": raw.get("rope_theta", _DEFAULT_THETA), **given}
    if raw.get("partial_rotary_factor") is not None:
        rope.setdefault("partial_rotary_factor", raw["partial_rotary_factor"])
    if rope["rope_type"] in ("llama3", "yarn"):
        trained = raw.get("original_max_position_embeddings")  # models give it priority
        if trained is not None:
            rope["original_max_position_embeddings"] = trained
        rope.setdefault("original_max_position_embeddings", fields["max_position_embeddings"])
    return rope
