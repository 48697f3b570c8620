"""An FP8 KV cache: where its scales come from, that they are the same on every node, and what it does to a model."""

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_kernels.kv_scales import FP8, KVScales, encode
from paged_kernels.reference import ReferenceBackend
from paged_kernels.registry import BackendName, select_backend
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvrelay.core.errors import ConfigurationError, ModelLoadError
from kvrelay.engine.kv_cache_dtype import choose_kv_scales, kv_layout, scales_digest
from kvrelay.engine.loading.calculated_kv_scales import calculate_kv_scales, largest_keys, largest_values
from kvrelay.engine.loading.checkpoint import open_checkpoint
from kvrelay.engine.loading.loader import LoadedModel, load_model
from kvrelay.engine.options import EngineOptions
from kvrelay.engine.startup import PreparedEngine, prepare_engine
from tests.demo_model import DEMO_MODEL
from tests.engine.paged_run import PagedRun
from tests.engine.prequantized_models import make_prequantized_model
from tests.engine.tiny_models import make_tiny_model

WEIGHTS = "model.safetensors"
NUM_LAYERS, NUM_KV_HEADS = 3, 2  # of the tiny models


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def with_scales(llama: Path, tmp_path: Path) -> Path:
    """Makes a copy of a model to which a test adds scales."""
    return shutil.copytree(llama, tmp_path / "scaled")


def _load(directory: Path, *, backend: BackendName = "auto") -> LoadedModel:
    return load_model(str(directory), dtype="auto", attention=select_backend(backend), max_model_len=None)


def _add(directory: Path, tensors: dict[str, Tensor]) -> None:
    """Adds `tensors`, by the part of their names that follows `model.layers.`."""
    stored = load_file(directory / WEIGHTS) | {f"model.layers.{name}": tensor for name, tensor in tensors.items()}
    save_file(stored, directory / WEIGHTS, metadata={"format": "pt"})


def _scales(key: str, value: str, *shape: int) -> dict[str, Tensor]:
    """Returns scales: i + 1 / 4 for K of layer i, and twice that for V. With more than one value, head h has h more."""
    found = {}
    for layer in range(NUM_LAYERS):
        heads = torch.zeros(1) if not shape else torch.arange(NUM_KV_HEADS).float().view(shape)
        found[f"{layer}.self_attn.{key}"] = (heads + layer + 0.25).view(shape)
        found[f"{layer}.self_attn.{value}"] = (2 * (heads + layer + 0.25)).view(shape)
    return found


def _prepare(directory: Path, **options: Any) -> PreparedEngine:
    return prepare_engine(EngineOptions(str(directory), num_blocks=8, **options))


# Calculated scales


@pytest.mark.parametrize("family", ["llama", "llama-mha", "llama-rope-yarn", "mistral", "qwen2", "qwen3-bias-sliding"])
def test_no_key_or_value_is_beyond_the_calculated_scales(family: str, tmp_path: Path) -> None:
    """K and V of random tokens at positions far apart fit, and the scales are no larger than necessary."""
    loaded = _load(make_tiny_model(family, tmp_path), backend="reference")
    scales = calculate_kv_scales(loaded.checkpoint, loaded.config)
    run = PagedRun(loaded.model, num_sequences=4, max_tokens=300)
    run.step(torch.randint(320, (4, 300), generator=torch.Generator().manual_seed(1)).tolist())
    largest = run.pool.nan_to_num().abs().amax(dim=(0, 4, 5))  # [num_kv_heads, num_layers, 2]
    for which, found in enumerate((scales.key, scales.value)):
        assert found.shape == (NUM_LAYERS, loaded.config.num_kv_heads)
        assert found.dtype is torch.float32 and found.is_contiguous()
        assert torch.equal(torch.frexp(found).mantissa, torch.full_like(found, 0.5)), "powers of two"
        share = largest[:, :, which].T / (448 * found)
        assert bool((share < 1).all()) and bool((share > 1 / 32).all())


def test_the_bound_is_reached_by_the_input_that_points_along_a_row(llama: Path) -> None:
    """V of head 1 in layer 2 reaches the bound for an input as long as RMSNorm makes it."""
    loaded = _load(llama)
    weights = {name.removeprefix("model.layers.2."): tensor for name, tensor in load_file(llama / WEIGHTS).items()}
    rows = (weights["self_attn.v_proj.weight"] * weights["input_layernorm.weight"])[16:].double()
    longest = rows[rows.norm(dim=1).argmax()]
    value = rows @ (longest * 64**0.5 / longest.norm())
    bound = largest_values(loaded.checkpoint.tensors(), loaded.config, 2)[1]
    torch.testing.assert_close(value.abs().max(), bound)


def test_a_bias_counts_in_the_bound(tmp_path: Path) -> None:
    directory = make_tiny_model("qwen2", tmp_path)
    config, size = _load(directory).config, NUM_KV_HEADS * 16
    bounds = []
    for bias in (0.0, -100.0):
        _add(directory, {f"1.self_attn.{name}.bias": torch.full((size,), bias) for name in ("k_proj", "v_proj")})
        tensors = open_checkpoint(directory).tensors()
        bounds.append((largest_keys(tensors, config, 1), largest_values(tensors, config, 1)))
    (keys, values), (biased_keys, biased_values) = bounds
    torch.testing.assert_close(biased_values - values, torch.full_like(values, 100.0))
    assert bool((biased_keys > keys + 100.0).all()), "two of them are rotated into each other"


def test_keys_that_yarn_stretches_are_bounded_as_stretched(tmp_path: Path) -> None:
    loaded = _load(make_tiny_model("llama-rope-yarn", tmp_path))
    factor = loaded.config.rope.attention_factor
    assert factor > 1
    plain = replace(loaded.config, rope=replace(loaded.config.rope, attention_factor=1.0))
    stretched, found = (largest_keys(loaded.checkpoint.tensors(), config, 0) for config in (loaded.config, plain))
    torch.testing.assert_close(stretched, found * factor)


def test_an_engine_that_starts_again_has_the_same_scales_whatever_it_computes_with(llama: Path) -> None:
    fp8 = {"kv_cache_dtype": "fp8", "calculate_kv_scales": True}
    first = _prepare(llama, **fp8)
    others = [_prepare(llama, **fp8), _prepare(llama, **fp8, attention_backend="reference")]
    assert all(other.namespace == first.namespace for other in others)
    assert _prepare(llama, **fp8, dtype="bfloat16").layout == first.layout
    assert len(first.layout.scales_digest) == 32


def test_the_scales_of_a_model_never_change() -> None:
    """Nodes of other releases and on other machines need the same scales for the same names."""
    layout = _prepare(DEMO_MODEL, kv_cache_dtype="fp8", calculate_kv_scales=True).layout
    assert layout.scales_digest == "73a7fd4953eda450b250f87b1df1f9c7"


def test_a_head_that_is_always_zero_has_a_scale_of_one(with_scales: Path) -> None:
    value = load_file(with_scales / WEIGHTS)["model.layers.1.self_attn.v_proj.weight"]
    value[16:] = 0
    _add(with_scales, {"1.self_attn.v_proj.weight": value})
    loaded = _load(with_scales)
    assert calculate_kv_scales(loaded.checkpoint, loaded.config).value[1, 1] == 1


def test_weights_that_are_not_finite_give_no_scales(with_scales: Path) -> None:
    loaded = _load(with_scales)
    weight = load_file(with_scales / WEIGHTS)["model.layers.1.self_attn.v_proj.weight"]
    weight[0, 0] = float("nan")
    _add(with_scales, {"1.self_attn.v_proj.weight": weight})
    with pytest.raises(ModelLoadError, match=r"v_proj.weight is not finite"):
        calculate_kv_scales(open_checkpoint(with_scales), loaded.config)


@pytest.mark.parametrize(
    ("family", "recipe", "leave"),
    [
        ("qwen2", "awq-64", ()),
        ("llama", "awq-no-zeros", ("v_proj",)),
        ("mistral", "awq-all", ()),
        ("llama", "gptq-32-orders", ()),
        ("llama", "gptq-64-8-bits", ()),
    ],
)
def test_a_quantised_checkpoint_has_the_scales_of_its_dequantised_weights(
    family: str, recipe: str, leave: tuple[str, ...], tmp_path: Path
) -> None:
    model = make_prequantized_model(family, recipe, tmp_path, leave=leave)
    fp8 = {"kv_cache_dtype": "fp8", "calculate_kv_scales": True}
    assert _prepare(model.directory, **fp8).layout == _prepare(model.meant, **fp8).layout


# The checkpoint's scales


@pytest.mark.parametrize(
    ("key", "value"),
    [("k_scale", "v_scale"), ("attn.k_scale", "attn.v_scale"), ("k_proj.k_scale", "v_proj.v_scale")],
)
@pytest.mark.parametrize("shape", [(), (1,), (NUM_KV_HEADS,), (NUM_KV_HEADS, 1, 1)], ids=str)
def test_the_scales_of_a_checkpoint_are_read_under_every_name_and_shape(
    key: str, value: str, shape: tuple[int, ...], with_scales: Path, caplog: pytest.LogCaptureFixture
) -> None:
    per_head = NUM_KV_HEADS in shape
    tensors = _scales(key, value, *shape) if per_head else _scales(key, value)
    _add(with_scales, {name: tensor if per_head else tensor.view(shape) for name, tensor in tensors.items()})
    with caplog.at_level(logging.WARNING):
        scales = choose_kv_scales(_load(with_scales), "fp8", calculate=True)
    assert scales is not None and not caplog.records, "known tensors, and no need to calculate"
    step = 1.0 if per_head else 0.0
    assert scales.key.tolist() == [[layer + 0.25, layer + 0.25 + step] for layer in range(NUM_LAYERS)]
    assert torch.equal(scales.value, 2 * scales.key)


def test_one_scale_may_be_for_keys_and_values(with_scales: Path) -> None:
    _add(with_scales, {f"{layer}.self_attn.kv_scale": torch.tensor([0.5], dtype=torch.bfloat16) for layer in range(3)})
    scales = choose_kv_scales(_load(with_scales), "fp8_e4m3", calculate=False)
    assert scales is not None and bool((scales.key == 0.5).all()) and bool((scales.value == 0.5).all())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"1.self_attn.v_scale": None}, "tensor model.layers.1.self_attn.v_scale is missing"),
        ({"2.self_attn.k_scale": torch.ones(3)}, r"k_scale has shape \[3\], not one value or one per KV head \(2\)"),
        ({"2.self_attn.k_scale": torch.ones(0)}, r"k_scale has shape \[0\], not one value or one per KV head \(2\)"),
        ({"0.self_attn.k_scale": torch.zeros(1)}, r"k_scale must be finite and at least 1.18e-38, not \[0.0\]"),
        ({"0.self_attn.v_scale": torch.tensor([1.0, float("nan")])}, "v_scale must be finite and at least"),
        ({"0.self_attn.v_scale": torch.tensor([1.0, 1e-39])}, "v_scale must be finite and at least"),
    ],
)
def test_unusable_scales_are_refused_only_with_fp8(
    change: dict[str, Tensor | None], message: str, with_scales: Path
) -> None:
    tensors = _scales("k_scale", "v_scale") | change
    _add(with_scales, {name: tensor for name, tensor in tensors.items() if tensor is not None})
    loaded = _load(with_scales)
    assert choose_kv_scales(loaded, "auto", calculate=False) is None
    with pytest.raises(ModelLoadError, match=message):
        choose_kv_scales(loaded, "fp8", calculate=False)


def test_a_config_that_quantises_only_kv_to_static_fp8_is_accepted(with_scales: Path) -> None:
    path = with_scales / "config.json"
    config = json.loads(path.read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    quantization: dict[str, Any] = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
    path.write_text(json.dumps({**config, "quantization_config": quantization}))
    _add(with_scales, _scales("k_scale", "v_scale"))
    assert choose_kv_scales(_load(with_scales), "fp8", calculate=False) is not None
    for other in ({"type": "int"}, {"num_bits": 4}, {"dynamic": True}):
        quantization["kv_cache_scheme"] = scheme | other
        path.write_text(json.dumps({**config, "quantization_config": quantization}))
        with pytest.raises(ModelLoadError, match="quantization_config"):
            _load(with_scales)


# Neither


def test_without_scales_they_are_one_and_the_log_says_so(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        scales = choose_kv_scales(_load(llama), "fp8", calculate=False)
    assert scales is not None and bool((scales.key == 1).all()) and bool((scales.value == 1).all())
    assert "calculate_kv_scales finds" in caplog.text


def test_calculating_scales_without_fp8_is_refused(llama: Path) -> None:
    with pytest.raises(ConfigurationError, match="set kv_cache_dtype to fp8"):
        _prepare(llama, calculate_kv_scales=True)


# Names


def test_kv_of_another_dtype_or_other_scales_has_other_names(llama: Path) -> None:
    loaded = _load(llama)
    ones = torch.ones(NUM_LAYERS, NUM_KV_HEADS)
    last_bit = ones.clone()
    last_bit[-1, -1] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    layouts = [
        kv_layout(loaded, 16, scales)
        for scales in (None, KVScales(ones, ones), KVScales(last_bit, ones), KVScales(ones, last_bit))
    ]
    assert [layout.dtype for layout in layouts] == ["float32"] + 3 * ["float8_e4m3fn"]
    assert [layout.block_bytes for layout in layouts] == [4 * 3072] + 3 * [3072]
    assert layouts[0].layout_id == "hl2td/2x3x2x16x16/float32"
    assert layouts[1].layout_id == "hl2td/2x3x2x16x16/float8_e4m3fn/" + scales_digest(KVScales(ones, ones))
    assert len({layout.layout_id for layout in layouts}) == 4
    prepared = _prepare(llama, kv_cache_dtype="fp8")
    roots = {replace(prepared, layout=layout).namespace.root() for layout in layouts}
    assert len(roots) == 4 and prepared.namespace.root() in roots
    assert prepared.namespace == _prepare(llama, kv_cache_dtype="fp8_e4m3").namespace


def test_the_digest_is_over_little_endian_floats() -> None:
    """Nodes of other releases need the same digest for the same names."""
    scales = KVScales(torch.tensor([[0.5, 1.0]]), torch.tensor([[2.0, 0.25]]))
    assert scales_digest(scales) == "fb3c44495f3722a69752208793765fd0"


# The model


class RoundTripBackend(ReferenceBackend):
    """The reference: K and V are quantised, dequantised at once, and kept in float32."""

    def __init__(self, kv_scales: KVScales) -> None:
        super().__init__()
        self._round_trip = kv_scales

    def write_kv(self, key: Tensor, value: Tensor, kv_pool: Tensor, layer: int, slot_mapping: Tensor) -> None:
        scales = [scale[:, None] for scale in self._round_trip.of_layer(layer)]
        key, value = (encode(rows, scale).float() * scale for rows, scale in zip((key, value), scales, strict=True))
        super().write_kv(key, value, kv_pool, layer, slot_mapping)


def _logits(loaded: LoadedModel, pool_dtype: torch.dtype, chunks: list[list[int]]) -> Tensor:
    run = PagedRun(loaded.model, num_sequences=1, max_tokens=sum(map(len, chunks)))
    run.pool = torch.zeros(run.pool.shape, dtype=pool_dtype)
    return torch.cat([run.step([chunk])[0] for chunk in chunks])


@pytest.mark.parametrize("family", ["llama", "qwen2-sliding", "qwen3"])
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_model_over_fp8_is_that_over_dequantised_kv(family: str, backend: BackendName, tmp_path: Path) -> None:
    loaded = _load(make_tiny_model(family, tmp_path), backend="reference")
    scales = calculate_kv_scales(loaded.checkpoint, loaded.config)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(320, (75,), generator=generator).tolist()
    chunks = [tokens[begin:end] for begin, end in ((0, 40), (40, 60), (60, 61), (61, 62), (62, 75))]
    plain = _logits(loaded, torch.float32, chunks)
    loaded.model.attend_with(RoundTripBackend(scales))
    expected = _logits(loaded, torch.float32, chunks)
    loaded.model.attend_with(select_backend(backend, kv_scales=scales))
    torch.testing.assert_close(_logits(loaded, FP8, chunks), expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(plain, expected, rtol=1e-3, atol=1e-3), "quantising is felt"
