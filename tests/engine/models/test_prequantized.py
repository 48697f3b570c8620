"""Checkpoints of AWQ and GPTQ, compared with transformers on the dequantised float32 weights."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_kernels.cpu import quantized
from safetensors.torch import load_file
from torch import Tensor

from bench.random_model import write_random_model
from kvrelay.core.config.option_types import Quantization
from kvrelay.core.errors import ConfigurationError, ModelLoadError
from kvrelay.engine.layers.linear import Linear, LinearLayer, LinearsApart
from kvrelay.engine.layers.prequantized_linear import PrequantizedLinear, RepackedProduct
from kvrelay.engine.loading.loader import LoadedModel
from tests.engine.load_on_cpu import load
from tests.engine.paged_run import PagedRun, check_greedy
from tests.engine.prequantized_models import (
    RECIPES,
    WEIGHTS,
    PrequantizedModel,
    edit_tensors,
    make_prequantized_model,
    split_in_shards,
    zeros_of,
)
from tests.engine.reference import Reference

QUERY, DOWN = "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj"


def _check_greedy(model: PrequantizedModel, loaded: LoadedModel) -> None:
    prompt = torch.randint(0, 320, (75,), generator=torch.Generator().manual_seed(1)).tolist()
    check_greedy(loaded.model, Reference(model.meant), prompt, num_tokens=12)


# Weights and tokens


@pytest.mark.parametrize("recipe", RECIPES)
def test_greedy_tokens_are_those_of_the_dequantised_weights(recipe: str, tmp_path: Path) -> None:
    model = make_prequantized_model("qwen2", recipe, tmp_path)
    _check_greedy(model, load(model.directory))


@pytest.mark.parametrize(
    ("family", "recipe"),
    [("llama", "awq-64"), ("llama-bias", "gptq-32-orders"), ("mistral", "gptq-all"), ("qwen3", "gptq_v2-64")],
)
def test_every_family_draws_the_tokens_of_the_dequantised_weights(family: str, recipe: str, tmp_path: Path) -> None:
    model = make_prequantized_model(family, recipe, tmp_path)
    _check_greedy(model, load(model.directory))


@pytest.mark.parametrize("recipe", ["awq-32", "gptq-32-orders"])
def test_plain_torch_draws_the_same_tokens(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "load_extension", lambda: None)
    model = make_prequantized_model("llama-bias", recipe, tmp_path)
    _check_greedy(model, load(model.directory))


@pytest.mark.parametrize("recipe", ["awq-64", "gptq-32-order"])
def test_bfloat16_follows_the_dequantised_weights(recipe: str, tmp_path: Path) -> None:
    """Nodes compute in bfloat16, with many rows in a prompt and one row in a decode step."""
    model = make_prequantized_model("llama", recipe, tmp_path)
    prompt = torch.randint(0, 320, (100,), generator=torch.Generator().manual_seed(2)).tolist()
    run = PagedRun(load(model.directory, dtype="bfloat16").model, num_sequences=1, max_tokens=100)
    logits = torch.cat([run.step([prompt[:90]])[0], *(run.step([[token]])[0] for token in prompt[90:])])
    plain = PagedRun(load(model.meant, dtype="bfloat16").model, num_sequences=1, max_tokens=100)
    expected = Reference(model.meant).logits(prompt)
    rounding = (plain.step([prompt])[0] - expected).abs().mean()
    assert (logits - expected).abs().mean() < 1.5 * rounding  # no further than bfloat16 weights are


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_weight_is_exact(recipe: str, tmp_path: Path) -> None:
    model = make_prequantized_model("llama", recipe, tmp_path)
    for index, layer in enumerate(load(model.directory).model.layers):
        prefix = f"model.layers.{index}"
        attention, mlp = layer.attention, layer.mlp
        for linear, parts in (
            (attention.qkv, [f"self_attn.{name}_proj" for name in "qkv"]),
            (attention.output, ["self_attn.o_proj"]),
            (mlp.gate_up, ["mlp.gate_proj", "mlp.up_proj"]),
            (mlp.down, ["mlp.down_proj"]),
        ):
            expected = torch.cat([model.layers[f"{prefix}.{part}"].dequantized() for part in parts])
            assert torch.equal(_weight_of(linear), expected)


def _weight_of(linear: LinearLayer) -> Tensor:
    """Returns the layer's weights, dequantised, `[num_outputs, num_inputs]`."""
    assert isinstance(linear, PrequantizedLinear)
    rows = []
    for product, _ in linear._products:
        assert isinstance(product, RepackedProduct)
        wide = quantized.dequantize(product.weight.weight, torch.float32)
        order = product.weight.input_order
        rows.append(wide if order is None else wide[:, order.argsort()])
    return torch.cat(rows)


@pytest.mark.parametrize(
    ("recipe", "products"), [("gptq-64", (1, 1)), ("gptq-32-order", (1, 1)), ("gptq-32-orders", (3, 2))]
)
def test_parts_are_joined_where_their_groups_agree(recipe: str, products: tuple[int, int], tmp_path: Path) -> None:
    layer = load(make_prequantized_model("llama", recipe, tmp_path).directory).model.layers[0]
    qkv, gate_up = layer.attention.qkv, layer.mlp.gate_up
    assert isinstance(qkv, PrequantizedLinear) and isinstance(gate_up, PrequantizedLinear)
    assert (len(qkv._products), len(gate_up._products)) == products


# What is quantised and what is not


def test_modules_that_were_left_alone_are_plain_layers(tmp_path: Path) -> None:
    leave = ("k_proj", "layers.1.mlp.down_proj")
    named = ["self_attn.k_proj", "model.layers.1.mlp.down_proj"]
    model = make_prequantized_model("llama-bias", "awq-64", tmp_path, leave=leave, modules_to_not_convert=named)
    loaded = load(model.directory)
    assert isinstance(loaded.model.layers[0].attention.qkv, LinearsApart)
    assert isinstance(loaded.model.layers[1].mlp.down, Linear)
    assert isinstance(loaded.model.layers[2].mlp.down, PrequantizedLinear)
    _check_greedy(model, loaded)


def test_without_a_list_the_tensors_tell_which_modules_are_quantised(tmp_path: Path) -> None:
    rules: dict[str, Any] = {r"-:.*\.o_proj": {}}
    model = make_prequantized_model("llama", "gptq-64", tmp_path, leave=("o_proj",), dynamic=rules)
    loaded = load(model.directory)
    assert isinstance(loaded.model.layers[0].attention.output, Linear)
    _check_greedy(model, loaded)


def test_a_module_on_the_list_of_exceptions_must_be_plain(tmp_path: Path) -> None:
    model = make_prequantized_model("llama", "awq-64", tmp_path, modules_to_not_convert=["down_proj"])
    with pytest.raises(ModelLoadError, match=r"tensor model.layers.0.mlp.down_proj.weight is missing"):
        load(model.directory)


def test_a_quantised_head_stays_quantised(tmp_path: Path) -> None:
    model = make_prequantized_model("llama", "gptq-64", tmp_path, quantize_head=True, lm_head=True)
    loaded = load(model.directory)
    assert isinstance(loaded.model.lm_head, PrequantizedLinear)
    _check_greedy(model, loaded)


def test_biases_that_the_model_does_not_know_are_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Older GPTQ tools write a bias of zeros for every layer."""
    model = make_prequantized_model("llama", "gptq-64", tmp_path)
    before = load(model.directory)
    edit_tensors(model.directory, {f"{DOWN}.bias": torch.zeros(64)})
    after = load(model.directory)
    assert f"ignored: {DOWN}.bias" in caplog.text
    prompt = list(range(20))
    first, second = (PagedRun(one.model, num_sequences=1, max_tokens=20).step([prompt])[0] for one in (before, after))
    assert torch.equal(first, second)


# Loading


def test_shards_give_the_same_model(tmp_path: Path) -> None:
    model = make_prequantized_model("llama-bias", "gptq-32-orders", tmp_path)
    whole = load(model.directory)
    split_in_shards(model.directory, num_shards=4)
    many = load(model.directory)
    prompt = list(range(30))
    first, second = (PagedRun(one.model, num_sequences=1, max_tokens=30).step([prompt])[0] for one in (whole, many))
    assert torch.equal(first, second)


def test_scales_may_have_any_dtype(tmp_path: Path) -> None:
    model = make_prequantized_model("llama", "awq-64", tmp_path)
    stored = load_file(model.directory / WEIGHTS)
    edit_tensors(model.directory, {name: t.float() for name, t in stored.items() if name.endswith(".scales")})
    _check_greedy(model, load(model.directory))


def test_no_checkpoint_tensor_is_kept_on_a_cpu(tmp_path: Path) -> None:
    loaded = load(make_prequantized_model("llama", "awq-64", tmp_path).directory)
    down = loaded.model.layers[0].mlp.down
    assert isinstance(down, PrequantizedLinear) and not down._parts
    codes, scales_and_zeros = 192 * 64 // 2, 3 * 64 * (4 + 2)
    assert down.num_bytes == codes + scales_and_zeros


def test_the_log_says_which_quantisation_was_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    load(make_prequantized_model("llama", "gptq-64", tmp_path).directory)
    assert "a quantised checkpoint (gptq, 4 bits, groups of 64): " in caplog.text
    assert "repacked for the CPU's integer kernels, exactly; computing in float32" in caplog.text


def test_the_fingerprint_covers_how_weights_are_read(tmp_path: Path) -> None:
    model = make_prequantized_model("llama", "gptq-64", tmp_path)
    found = {load(model.directory).fingerprint, load(model.directory).fingerprint}
    _edit_quantization(model.directory, checkpoint_format="gptq_v2")
    found.add(load(model.directory).fingerprint)
    zeros = load_file(model.directory / WEIGHTS)[f"{QUERY}.qzeros"]
    zeros[0, 0] ^= 1
    edit_tensors(model.directory, {f"{QUERY}.qzeros": zeros})
    found.add(load(model.directory).fingerprint)
    assert len(found) == 3


def test_the_format_is_also_known_by_its_newer_name(tmp_path: Path) -> None:
    model = make_prequantized_model("llama", "gptq_v2-64", tmp_path)
    expected = load(model.directory).fingerprint
    _edit_quantization(model.directory, checkpoint_format=None, format="gptq_v2")
    assert load(model.directory).fingerprint == expected
    _edit_quantization(model.directory, checkpoint_format="gptq_v2", format="gptq")
    assert load(model.directory).fingerprint == expected


# Refusals


def test_a_random_model_needs_whole_groups(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the sizes of the shape tiny are not multiples of 128"):
        write_random_model(tmp_path / "tiny", "tiny", quantization="awq")


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_quantised_checkpoint_is_not_quantised_again(quantization: Quantization, tmp_path: Path) -> None:
    model = make_prequantized_model("llama", "awq-64", tmp_path)
    expected = rf"quantization {quantization}: .* quantised already \(awq, 4 bits, groups of 64\); use none"
    with pytest.raises(ConfigurationError, match=expected):
        load(model.directory, quantization)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "bitsandbytes"}, r"quant_method: 'bitsandbytes' is not supported; supported are awq .*gptq"),
        ({"quant_method": "compressed-tensors"}, "quant_method: 'compressed-tensors'"),
        ({"quant_method": "fp8"}, "quant_method: 'fp8'"),
        ({"quant_method": None}, "quant_method: None"),
        ({"bits": 3}, "bits: 3 is not supported"),
        ({"bits": True}, "bits: True is not supported"),
        ({"group_size": 48}, "group_size: 48 must be -1 or a multiple of 32"),
        ({"group_size": 0}, "group_size: 0 must be"),
        ({"group_size": 160}, r"group_size: 160 does not divide the 64 inputs .* of model.layers.0.self_attn.q_proj"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format: 'marlin'"),
        ({"checkpoint_format": None, "format": "marlin"}, "format: 'marlin'"),
        ({"is_marlin_format": True}, "checkpoint_format: 'marlin'"),
        ({"pack_dtype": "int16"}, "pack_dtype: 'int16'"),
        ({"desc_act": "yes"}, "desc_act: 'yes' must be true or false"),
        ({"dynamic": {"+:.*down": {"bits": 8}}}, "dynamic: .* is not supported"),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert: 'lm_head' must be a list of names"),
        ({"quant_method": "awq", "version": "gemv"}, "version: 'gemv'"),
        ({"quant_method": "awq", "format": "gemv"}, "format: 'gemv'"),
        ({"quant_method": "awq", "backend": "llm-awq"}, "backend: 'llm-awq'"),
        ({"quant_method": "awq", "bits": 8}, "bits: 8 is not supported"),
    ],
)
def test_an_unsupported_quantization_config_is_refused_by_field(
    changes: dict[str, Any], message: str, gptq: Path
) -> None:
    _edit_quantization(gptq, **changes)
    with pytest.raises(ModelLoadError, match=rf"config.json: quantization_config.{message}"):
        load(gptq)


def test_a_quantization_config_that_is_no_object_is_refused(gptq: Path) -> None:
    fields = json.loads((gptq / "config.json").read_text())
    (gptq / "config.json").write_text(json.dumps(fields | {"quantization_config": "awq"}))
    with pytest.raises(ModelLoadError, match="quantization_config must be an object, not a str"):
        load(gptq)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("scales", None, "is missing from"),
        ("qzeros", None, "is missing from"),
        ("qweight", None, "is missing from"),
        ("qweight", zeros_of(8, 60), r"has shape \[8, 60\], not \[8, 64\]"),
        ("qzeros", zeros_of(2, 8), r"has shape \[2, 8\], not \[1, 8\]"),
        ("scales", torch.ones(2, 64), r"has shape \[2, 64\], not \[1, 64\]"),
        ("qweight", torch.ones(8, 64), "has dtype F32; packed codes must have I32"),
        ("scales", zeros_of(1, 64), "has dtype I32; supported are F32"),
        ("g_idx", zeros_of(63), r"has shape \[63\], not \[64\]"),
        ("g_idx", zeros_of(64) + 1, "cannot be used: its groups are 1 to 1, but there are scales for 0 to 0"),
        ("g_idx", zeros_of(64) - 1, "cannot be used: its groups are -1 to -1"),
    ],
)
def test_bad_tensors_are_named_with_their_file(name: str, tensor: Tensor | None, message: str, gptq: Path) -> None:
    edit_tensors(gptq, {f"{QUERY}.{name}": tensor})
    with pytest.raises(ModelLoadError, match=rf"tensor {QUERY}.{name}.*{message}") as caught:
        load(gptq)
    assert str(gptq / WEIGHTS) in str(caught.value)


def test_groups_of_unequal_sizes_are_refused(gptq: Path) -> None:
    groups = torch.arange(192) // 64
    groups[0] = 2
    edit_tensors(gptq, {f"{DOWN}.g_idx": groups.int()})
    with pytest.raises(ModelLoadError, match=rf"tensor {DOWN}.g_idx .* group 0 has 63 inputs instead of 64"):
        load(gptq)


def test_groups_in_no_order_need_an_index(gptq: Path) -> None:
    _edit_quantization(gptq, desc_act=True)
    edit_tensors(gptq, {f"{DOWN}.g_idx": None})
    with pytest.raises(ModelLoadError, match=rf"tensor {DOWN}.g_idx is missing"):
        load(gptq)
    _edit_quantization(gptq, desc_act=False)
    load(gptq)  # where they are in order nobody needs to be told


@pytest.fixture
def gptq(tmp_path: Path) -> Path:
    return make_prequantized_model("llama", "gptq-64", tmp_path).directory


def _edit_quantization(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    fields = json.loads(path.read_text())
    fields["quantization_config"] |= changes
    path.write_text(json.dumps(fields))
