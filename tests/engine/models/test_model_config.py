"""Fields of `config.json` that would give a model other tokens, if they were ignored, are refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvrelay.core.errors import ModelLoadError
from kvrelay.engine.models.model_config import load_model_config

_LAYERS = ["full_attention", "sliding_attention"]
_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
_TRAINED = {"factor": 2.0, "original_max_position_embeddings": 64.5}
_TRAINED_64 = {"factor": 2.0, "original_max_position_embeddings": 64}
_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **_TRAINED}
_LLAMA3_64 = {**_LLAMA3, "original_max_position_embeddings": 64}
_CHUNKS = {"chunk_size": 64, "local_size": 8, "original_max_position_embeddings": 48}


def _save(directory: Path, family: str, fields: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps({"model_type": family, **_SIZES, **fields}))
    return directory


@pytest.mark.parametrize(
    ("families", "fields", "message"),
    [
        ("llama", {"sliding_window": 24}, "sliding_window: 24 is not supported for llama; supported is null"),
        ("llama", {"sliding_window": 24, "layer_types": _LAYERS}, "sliding_window: 24 is not supported for llama"),
        ("llama mistral", {"layer_types": _LAYERS[:1]}, "layer_types: .* for each of 2 layers"),
        ("mistral", {"sliding_window": None, "layer_types": _LAYERS}, "layer_types: sliding_attention needs a"),
        ("qwen2 qwen3", {"use_sliding_window": False, "layer_types": _LAYERS}, "layer_types: sliding_attention needs"),
        ("qwen2 qwen3", {"use_sliding_window": "false"}, "use_sliding_window: 'false' must be true or false"),
        ("llama qwen3", {"rope_scaling": _LLAMA3}, "original_max_position_embeddings: 64.5 must be an integer"),
        ("mistral qwen2", {"rope_scaling": {"type": "yarn", **_TRAINED}}, "embeddings: 64.5 must be an integer"),
        ("qwen2", {"dual_chunk_attention_config": [64]}, "dual_chunk_attention_config: .* must be an object"),
        ("qwen2", {"dual_chunk_attention_config": {"chunk_size": "64"}}, "chunk_size: '64' must be a positive integer"),
        ("qwen2", {"dual_chunk_attention_config": _CHUNKS, "rope_scaling": _LLAMA3_64}, "together with a rope_type of"),
    ],
)
def test_what_would_change_tokens_is_refused(
    families: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    for family in families.split():
        with pytest.raises(ModelLoadError, match=message):
            load_model_config(_save(tmp_path, family, fields))


@pytest.mark.parametrize("family", ["mistral", "qwen2"])
@pytest.mark.parametrize("attention_bias", [None, True])
def test_a_bias_that_the_family_does_not_have_changes_nothing(
    family: str, attention_bias: bool | None, tmp_path: Path
) -> None:
    config = load_model_config(_save(tmp_path, family, {"attention_bias": attention_bias}))
    assert (config.qkv_bias, config.output_bias) == (family == "qwen2", False)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("window", [None, 24])
def test_a_window_that_no_layer_has_changes_nothing(family: str, window: int | None, tmp_path: Path) -> None:
    fields = {"sliding_window": window, "layer_types": _LAYERS[:1] * 2}
    assert load_model_config(_save(tmp_path, family, fields)).sliding_windows == (None, None)


def test_a_llamas_window_that_holds_all_positions_changes_nothing(tmp_path: Path) -> None:
    fields = {"sliding_window": 128, "max_position_embeddings": 128}
    assert load_model_config(_save(tmp_path, "llama", fields)).sliding_windows == (None, None)


@pytest.mark.parametrize(
    ("chunks", "length"),
    [(None, 128), ({"chunk_size": 64}, 64), (_CHUNKS, 48), ({"chunk_size": 4096, "local_size": 8}, 128)],
)
def test_only_the_first_of_dual_chunks_is_served(
    chunks: dict[str, int] | None, length: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Beyond it, the model was made with other distances."""
    fields = {"max_position_embeddings": 128, "dual_chunk_attention_config": chunks}
    config = load_model_config(_save(tmp_path, "qwen2", fields))
    assert (config.max_position_embeddings, config.max_context_length) == (length, length)
    warned = f"dual_chunk_attention_config is not supported: at most {length} of its 128 positions are served"
    assert (warned in caplog.text) == (length < 128)


@pytest.mark.parametrize(
    ("rope", "ignored"),
    [
        ({"rope_type": "yarn", **_TRAINED_64, "attn_factor": 0.9}, "attn_factor: not read with rope_type yarn"),
        ({"rope_type": "dynamic", **_TRAINED_64}, "original_max_position_embeddings: not read with rope_type dynamic"),
        ({"rope_type": "yarn", **_TRAINED_64, "mscale": 0.7, "beta_fast": 16}, None),
        ({"type": "linear", "factor": 2.0, "mscale": None}, None),
        ({**_LLAMA3, **_TRAINED_64}, None),
    ],
)
def test_a_rope_parameter_that_nobody_reads_is_named(
    rope: dict[str, Any], ignored: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither does transformers, but other engines may: it would change every token."""
    load_model_config(_save(tmp_path, "llama", {"rope_scaling": rope}))
    assert ignored in caplog.text if ignored else not caplog.text
