"""What the loader accepts, what it refuses and in which words, and what the fingerprint covers."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_kernels.cpu import packed
from paged_kernels.cpu.packed import PackedWeight
from paged_kernels.reference import ReferenceBackend
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from bench.random_model import write_random_model
from kvrelay.core.config.option_types import DTypeName
from kvrelay.core.errors import ConfigurationError, ModelLoadError
from kvrelay.engine.layers.linear import Linear
from kvrelay.engine.layers.rotary import RopeKind
from kvrelay.engine.layers.weight_format import WeightFormat
from kvrelay.engine.loading.loader import LoadedModel, fingerprint, load_model
from kvrelay.engine.models.model_config import ModelConfig, load_model_config
from tests.engine.tiny_models import FAMILIES, SLIDING_WINDOW, make_tiny_model, save_random

WEIGHTS = "model.safetensors"
QUERY = "model.layers.1.self_attn.q_proj.weight"
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make_tiny_model("llama", tmp_path / "llama")


def _load(directory: Path | str, *, dtype: DTypeName = "auto", max_model_len: int | None = None) -> LoadedModel:
    return load_model(str(directory), dtype=dtype, attention=ReferenceBackend(), max_model_len=max_model_len)


def _edit_config(directory: Path, **changes: Any) -> None:
    """Sets fields of config.json; None removes one."""
    path = directory / "config.json"
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))


def _edit_weights(directory: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Sets tensors of the weights file; None removes one."""
    changed = load_file(directory / WEIGHTS) | changes
    tensors = {name: tensor for name, tensor in changed.items() if tensor is not None}
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})


# Configuration


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_understood(family: str, tmp_path: Path) -> None:
    config = load_model_config(make_tiny_model(family, tmp_path))
    assert config.family == family.split("-")[0]
    assert (config.vocab_size, config.num_layers, config.dtype) == (320, 3, "float32")
    assert config.eos_token_ids == (257,)
    assert config.qk_norm == family.startswith("qwen3")
    assert config.qkv_bias == (family.startswith("qwen2") or "bias" in family)
    windows = {"mistral-sliding": [SLIDING_WINDOW] * 3}.get(family, [None, SLIDING_WINDOW, SLIDING_WINDOW])
    assert list(config.sliding_windows) == (windows if "sliding" in family else [None] * 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["Qwen2MoeForCausalLM"]},
            r"architectures: \['Qwen2MoeForCausalLM'\].*LlamaForCausalLM, Mistral",
        ),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures:"),
        ({"architectures": None, "model_type": "gemma2"}, "model_type: 'gemma2' is not supported; supported are llama"),
        ({"model_type": None}, "model_type: None"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act: 'gelu_pytorch_tanh'.*'silu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "num_attention_heads: 4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: 0"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "rope_type: 'spiral'.*llama3, yarn"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": -1.0}},
            r"rope_parameters\.factor: -1",
        ),
        *(
            ({"rope_parameters": _YARN | {field: value}}, rf"rope_parameters\.{field}: {value!r} must be a positive")
            for field in ("attention_factor", "beta_fast", "beta_slow", "mscale")
            for value in ("1", -1.0)
        ),
        (
            {"rope_parameters": _YARN | {"original_max_position_embeddings": float("inf")}},
            r"original_max_position_embeddings: inf",
        ),
        *(
            ({"rope_parameters": _YARN | {field: value}}, rf"rope_parameters\.{field}: .* between .* and 16777216")
            for field in ("beta_fast", "beta_slow")
            for value in (1e-300, 1e308)
        ),
        ({"rope_parameters": _YARN | {"rope_theta": 1}}, r"rope_parameters\.rope_theta: 1 must not be 1 for yarn"),
        (
            {"rope_parameters": _YARN | {"factor": None}, "max_position_embeddings": "many"},
            " max_position_embeddings: 'many'",
        ),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "head_dim": 2},
            "head_dim: 2 is too small for the rope_type dynamic",
        ),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor: 0.5"),
        ({"eos_token_id": 400}, "eos_token_id: 400"),
        ({"is_causal": False}, "is_causal: False"),
    ],
)
def test_a_configuration_that_can_not_run_is_refused_by_field(
    llama: Path, changes: dict[str, Any], message: str
) -> None:
    (llama / "generation_config.json").unlink()
    _edit_config(llama, **changes)
    with pytest.raises(ModelLoadError, match=message):
        _load(llama)


def test_a_directory_without_a_configuration_is_refused(llama: Path) -> None:
    (llama / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"has no config\.json"):
        _load(llama)


@pytest.mark.parametrize(("content", "message"), [("{", "not valid JSON"), ("[1]", "must hold a JSON object")])
def test_an_unreadable_configuration_is_refused(llama: Path, content: str, message: str) -> None:
    (llama / "config.json").write_text(content)
    with pytest.raises(ModelLoadError, match=message):
        _load(llama)


@pytest.mark.parametrize("model", ["/no/such/directory", "nobody/no-such-model", "no such model"])
def test_a_model_that_is_not_here_is_refused(model: str) -> None:
    with pytest.raises(ModelLoadError, match="neither a directory nor a model in the local Hugging Face cache"):
        _load(model)


def test_older_spelling_of_rope_scaling_is_understood(llama: Path) -> None:
    scaling = {"type": "linear", "factor": 2.0}
    _edit_config(llama, rope_parameters=None, rope_theta=50_000.0, rope_scaling=scaling)
    rope = load_model_config(llama).rope
    assert (rope.kind, rope.theta, rope.factor) == (RopeKind.LINEAR, 50_000.0, 2.0)


def test_defaults_are_those_of_the_family(tmp_path: Path) -> None:
    make_tiny_model("mistral", tmp_path)
    _edit_config(tmp_path, sliding_window=None, rope_parameters=None, head_dim=None)
    config = load_model_config(tmp_path)
    assert config.sliding_windows == (4096,) * 3  # MistralConfig's own default
    assert (config.rope.theta, config.head_dim) == (10_000.0, 16)


def test_generation_config_names_the_end_of_sequence_tokens(llama: Path) -> None:
    (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 259]}))
    assert load_model_config(llama).eos_token_ids == (257, 259)


def test_max_model_len_is_what_the_positions_reach(llama: Path, tmp_path: Path) -> None:
    assert _load(llama).max_model_len == 4096
    assert _load(llama, max_model_len=100).model.rotary.cos.shape == (100, 8)
    with pytest.raises(ConfigurationError, match="max_model_len must be between 1 and 4096"):
        _load(llama, max_model_len=4097)
    linear = make_tiny_model("llama-rope-linear", tmp_path / "linear")
    assert _load(linear).max_model_len == 4096
    assert _load(linear, max_model_len=4 * 4096).max_model_len == 4 * 4096
    _edit_config(llama, rope_parameters=_YARN | {"factor": 8.0})
    assert _load(llama).max_model_len == 8 * 1024


# Weights


def test_shards_give_the_same_model_as_one_file(llama: Path, tmp_path: Path) -> None:
    config = FAMILIES["llama"]()
    config.vocab_size = 320
    sharded = save_random(config, tmp_path / "sharded", max_shard_size="200KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    one, many = _load(llama).model.checkpoint_slots(), _load(sharded).model.checkpoint_slots()
    assert one.keys() == many.keys()
    for name, slot in one.items():
        assert torch.equal(slot.open(), many[name].open()), name


@pytest.mark.parametrize("family", ["llama", "llama-bias", "qwen3-bias-sliding"])
def test_every_tensor_of_the_file_lands_in_the_model(family: str, tmp_path: Path) -> None:
    stored = load_file(make_tiny_model(family, tmp_path) / WEIGHTS)
    slots = _load(tmp_path).model.checkpoint_slots()
    assert slots.keys() == stored.keys()
    assert all(torch.equal(slots[name].open(), stored[name]) for name in stored)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    config = FAMILIES["llama"]()
    save_random(config, tmp_path, max_shard_size="1MB")
    lost = sorted(tmp_path.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ModelLoadError, match=f"{lost.name} is missing"):
        _load(tmp_path)


def test_a_tensor_that_the_index_promises_is_named(tmp_path: Path) -> None:
    config = FAMILIES["llama"]()
    save_random(config, tmp_path, max_shard_size="1MB")
    index = tmp_path / "model.safetensors.index.json"
    shard = json.loads(index.read_text())["weight_map"][QUERY]
    tensors = load_file(tmp_path / shard)
    del tensors[QUERY]
    save_file(tensors, tmp_path / shard)
    with pytest.raises(ModelLoadError, match=rf"tensor {QUERY} is missing from .*{shard}"):
        _load(tmp_path)


def test_a_shard_outside_the_directory_is_refused(llama: Path) -> None:
    (llama / WEIGHTS).rename(llama / "elsewhere.safetensors")
    (llama / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {QUERY: "../elsewhere.safetensors"}}))
    with pytest.raises(ModelLoadError, match="beside the index"):
        _load(llama)


def test_a_missing_tensor_is_named(llama: Path) -> None:
    _edit_weights(llama, {QUERY: None})
    with pytest.raises(ModelLoadError, match=rf"tensor {QUERY} is missing from .*{WEIGHTS}"):
        _load(llama)


def test_a_wrong_shape_is_named(llama: Path) -> None:
    _edit_weights(llama, {QUERY: torch.zeros(64, 63)})
    with pytest.raises(ModelLoadError, match=rf"tensor {QUERY} in .*{WEIGHTS} has shape \[64, 63\].*\[64, 64\]"):
        _load(llama)


def test_a_wrong_dtype_is_named(llama: Path) -> None:
    _edit_weights(llama, {QUERY: torch.zeros(64, 64, dtype=torch.int8)})
    with pytest.raises(ModelLoadError, match=rf"tensor {QUERY} in .*{WEIGHTS} has dtype I8; supported are F32"):
        _load(llama)


def test_a_truncated_file_is_refused_before_it_is_read(llama: Path) -> None:
    content = (llama / WEIGHTS).read_bytes()
    (llama / WEIGHTS).write_bytes(content[:-1])
    with pytest.raises(ModelLoadError, match=f"{WEIGHTS} is truncated or damaged"):
        _load(llama)


@pytest.mark.parametrize(
    "content", [b"", b"short", b"\xff" * 64, (2).to_bytes(8, "little") + b"[]", b"\x08" + b"\0" * 15]
)
def test_a_file_of_another_kind_is_refused(llama: Path, content: bytes) -> None:
    (llama / WEIGHTS).write_bytes(content)
    with pytest.raises(ModelLoadError, match="not a safetensors file"):
        _load(llama)


@pytest.mark.parametrize("begin", [0, 12], ids=["overlap", "gap"])
def test_tensors_that_are_not_next_to_each_other_are_refused(llama: Path, begin: int) -> None:
    places = {"a": [0, 8], "b": [begin, begin + 8]}
    header = {name: {"dtype": "F32", "shape": [2], "data_offsets": place} for name, place in places.items()}
    encoded = json.dumps(header).encode()
    (llama / WEIGHTS).write_bytes(len(encoded).to_bytes(8, "little") + encoded + bytes(begin + 8))
    with pytest.raises(ModelLoadError, match=f"tensor b: bytes {begin} to {begin + 8} do not fit"):
        _load(llama)


def test_other_weight_formats_are_refused(llama: Path) -> None:
    (llama / WEIGHTS).rename(llama / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"neither model\.safetensors nor"):
        _load(llama)


def test_extra_tensors_are_mentioned_once(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    _edit_weights(llama, {"model.vision.a": torch.zeros(3), "model.vision.b": torch.zeros(3, dtype=torch.int64)})
    with caplog.at_level(logging.WARNING):
        _load(llama)
    assert len(caplog.records) == 1
    assert all(words in caplog.text for words in ("2 tensors", "model.vision.a", "model.vision.b"))


def test_known_surplus_is_not_mentioned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_tiny_model("llama-tied", tmp_path)
    frequencies = "model.layers.0.self_attn.rotary_emb.inv_freq"
    embedding = load_file(tmp_path / WEIGHTS)["model.embed_tokens.weight"]
    _edit_weights(tmp_path, {"lm_head.weight": embedding.clone(), frequencies: torch.zeros(8)})
    with caplog.at_level(logging.WARNING):
        loaded = _load(tmp_path)
    assert caplog.records == []
    assert loaded.model.lm_head is loaded.model.embedding


def test_progress_covers_every_byte(tmp_path: Path) -> None:
    save_random(FAMILIES["llama"](), tmp_path, max_shard_size="1MB")
    seen: list[tuple[int, int]] = []
    load_model(
        str(tmp_path),
        dtype="auto",
        attention=ReferenceBackend(),
        max_model_len=None,
        progress=lambda done, total: seen.append((done, total)),
    )
    total = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert seen[0] == (0, total) and seen[-1] == (total, total)
    assert seen == sorted(seen)


def test_the_benchmark_model_loads_and_every_token_decodes(tmp_path: Path) -> None:
    loaded = _load(write_random_model(tmp_path, "tiny"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.dtype is torch.bfloat16
    assert loaded.config.vocab_size == len(tokenizer) == 4096
    assert all(tokenizer.decode([token_id]) for token_id in range(4096))
    text = "naïve café 🎉"
    assert tokenizer.decode(tokenizer.encode(text)) == text


# dtype


@pytest.mark.parametrize(
    ("stored", "asked", "computed"),
    [
        (torch.float32, "auto", torch.float32),
        (torch.bfloat16, "auto", torch.bfloat16),
        (torch.float16, "auto", torch.float32),
        (torch.float16, "float16", torch.float16),
        (torch.float32, "bfloat16", torch.bfloat16),
        (torch.bfloat16, "float32", torch.float32),
    ],
)
@pytest.mark.parametrize("named_in_config", [True, False])
def test_weights_are_converted_to_the_dtype_to_compute_in(
    stored: torch.dtype, asked: DTypeName, computed: torch.dtype, named_in_config: bool, tmp_path: Path
) -> None:
    make_tiny_model("llama", tmp_path, dtype=stored)
    if not named_in_config:
        _edit_config(tmp_path, dtype=None)
    loaded = _load(tmp_path, dtype=asked)
    tensors = load_file(tmp_path / WEIGHTS)
    assert tensors[QUERY].dtype is stored
    assert loaded.dtype is computed
    projection = loaded.model.layers[1].attention.qkv
    assert isinstance(projection, Linear)
    weight, query = projection.weight, tensors[QUERY].to(computed)
    if isinstance(weight, PackedWeight):
        assert torch.equal(weight.panels[:2], packed.pack(query).panels)
    else:
        assert torch.equal(weight[:64], query)
    assert isinstance(loaded.model.embedding, torch.Tensor)
    assert torch.equal(loaded.model.embedding, tensors["model.embed_tokens.weight"].to(computed))
    assert torch.equal(loaded.model.norm, tensors["model.norm.weight"].to(computed))


def test_mixed_dtypes_are_converted(llama: Path) -> None:
    norm = "model.norm.weight"
    _edit_weights(llama, {norm: torch.full((64,), 1.5, dtype=torch.bfloat16)})
    loaded = _load(llama)
    assert loaded.model.norm.dtype is torch.float32
    assert loaded.model.norm.tolist() == [1.5] * 64


# Fingerprint


def test_the_fingerprint_names_content_not_places(llama: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(llama, tmp_path / "another name")
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    (copy / "README.md").write_text("hello")
    name = _load(llama).fingerprint
    assert len(name) == 32
    assert _load(copy, max_model_len=64).fingerprint == name


def test_the_fingerprint_follows_everything_that_changes_kv(llama: Path, tmp_path: Path) -> None:
    names = {_load(llama).fingerprint, _load(llama, dtype="bfloat16").fingerprint}
    content = bytearray((llama / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (llama / WEIGHTS).write_bytes(content)
    names.add(_load(llama).fingerprint)
    _edit_config(llama, rms_norm_eps=1e-5)
    names.add(_load(llama).fingerprint)
    _edit_config(llama, rope_parameters={"rope_type": "default", "rope_theta": 20_000.0})
    names.add(_load(llama).fingerprint)
    names.add(_load(make_tiny_model("llama", tmp_path / "seed", seed=1)).fingerprint)
    assert len(names) == 6


def test_the_fingerprint_of_a_given_content_never_changes(llama: Path) -> None:
    config: ModelConfig = load_model_config(llama)
    name = fingerprint(config, WeightFormat(torch.bfloat16, torch.device("cpu")), [bytes(range(16)), bytes(16)])
    assert name.hex() == "325e16ee5784bac0b3e3a8441d75044f819d5c49086b6aa20be0fd0204eac548"
