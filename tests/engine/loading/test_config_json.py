"""Every field that the engine reads from a `config.json` has the value that transformers gives it."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from kvrelay.core.errors import ModelLoadError
from kvrelay.engine.loading.config_json import FAMILIES, complete_config, read_config

READ = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
    "vocab_size", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "hidden_act", "eos_token_id",
    "rope_parameters",
)  # fmt: skip
READ_OF = {
    "llama": ("attention_bias", "mlp_bias", "head_dim"),
    "mistral": ("sliding_window", "head_dim"),
    "qwen2": ("sliding_window", "layer_types"),
    "qwen3": ("sliding_window", "layer_types", "head_dim", "attention_bias"),
}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_WINDOW = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2, "num_hidden_layers": 4}

FILES: dict[str, dict[str, Any]] = {
    "nothing but the family": {},
    "sizes": {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "rms_norm_eps": 1e-5},
    "as many KV heads as heads": {"num_attention_heads": 16, "num_key_value_heads": 16},
    "no end of sequence": {"eos_token_id": None},
    "ends of sequence": {"eos_token_id": [7, 8], "tie_word_embeddings": True},
    "a window": _WINDOW,
    "a window that is off": {**_WINDOW, "use_sliding_window": False},
    "windows by layer": {**_WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "windows from the first layer on": {**_WINDOW, "max_window_layers": 0},
    "windows from no layer on": {**_WINDOW, "max_window_layers": 28},
    "an older theta": {"rope_theta": 5e5},
    "a theta beside parameters of null": {"rope_theta": 5e5, "rope_parameters": None},
    "a theta beside parameters without one": {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default"}},
    "two thetas": {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 77.0}},
    "two types": {"rope_scaling": {"rope_type": "linear", "type": "dynamic", "factor": 2.0}},
    "a factor without a type": {"rope_scaling": {"factor": 2.0}},
    "empty scaling": {"rope_theta": 5e5, "rope_scaling": {}},
    "older scaling": {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "no scaling": {"rope_theta": 1e6, "rope_scaling": None},
    "llama3": {"rope_theta": 5e5, "rope_scaling": {**_LLAMA3, "original_max_position_embeddings": 512}},
    "llama3, trained length not said": {"rope_parameters": {**_LLAMA3, "rope_theta": 5e5}},
    "llama3, trained length beside": {"rope_parameters": _LLAMA3, "original_max_position_embeddings": 1024},
    "yarn": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}},
    "yarn, trained length not said": {"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_theta": 1e6},
    "yarn, trained length said twice": {
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
        "original_max_position_embeddings": 512,
    },
    "partial": {"partial_rotary_factor": 0.5},
    "partial, said twice": {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 1.0}},
    "both spellings of rope": {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": _LLAMA3},
    "dtype": {"dtype": "bfloat16", "torch_dtype": "float16"},
    "older dtype": {"torch_dtype": "float16"},
}


@pytest.mark.parametrize("case", FILES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_equals_that_of_transformers(family: str, case: str, tmp_path: Path) -> None:
    raw = {"model_type": family, **FILES[case]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    expected = AutoConfig.from_pretrained(tmp_path, local_files_only=True)
    expected.standardize_rope_params()  # as a model with scaled rotary embeddings does
    found = complete_config(raw, family, tmp_path / "config.json")
    read = {name: found[name] for name in READ + READ_OF[family]}
    read["rope_parameters"] = {name: value for name, value in read["rope_parameters"].items() if name != "type"}
    theirs = {name: getattr(expected, name) for name in read}
    for fields in (read, theirs):
        if fields.get("head_dim", 0) is None:
            fields["head_dim"] = found["hidden_size"] // found["num_attention_heads"]
    theirs["rope_parameters"] = {name: value for name, value in theirs["rope_parameters"].items() if name != "type"}
    assert read == theirs
    assert found["dtype"] == (None if expected.dtype is None else str(expected.dtype).removeprefix("torch."))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"per_layer_config": {"0": {"hidden_size": 8}}}, "per_layer_config"),
        ({"rope_scaling": "linear"}, "rope_parameters: 'linear'"),
        ({"use_sliding_window": "false"}, "use_sliding_window: 'false' must be true or false"),
        ({"use_sliding_window": True, "max_window_layers": "all"}, "max_window_layers: 'all'"),
    ],
)
def test_what_can_not_be_read_is_refused_by_field(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        complete_config(raw, "qwen2", Path("config.json"))


@pytest.mark.parametrize(
    ("file", "says"),
    [("adapter_config.json", "merge it into its base model"), ("model-q4.gguf", "GGUF is not supported: take")],
)
def test_what_is_no_model_is_named_by_its_file(file: str, says: str, tmp_path: Path) -> None:
    (tmp_path / file).touch()
    with pytest.raises(ModelLoadError, match=f"^{tmp_path} has no config.json, but {file}: .*{says}"):
        read_config(tmp_path / "config.json")
