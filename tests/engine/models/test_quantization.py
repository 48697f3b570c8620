"""Models with 8- and 4-bit weights, compared with transformers on the same weights widened to float32."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from paged_kernels.cpu import quantized_reference
from paged_kernels.cpu.quantized import GROUP_SIZES, empty_weight
from paged_kernels.cpu.quantized_weight import Bits
from paged_kernels.registry import select_backend
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvrelay.core.config.option_types import Quantization
from kvrelay.core.errors import ConfigurationError
from kvrelay.engine.layers.quantized_linear import QuantizedLinear
from kvrelay.engine.layers.weight_format import WeightFormat
from kvrelay.engine.loading.loader import LoadedModel, load_model
from tests.demo_model import DEMO_MODEL
from tests.engine.load_on_cpu import load
from tests.engine.paged_run import PagedRun, check_greedy
from tests.engine.reference import Reference
from tests.engine.tiny_models import FAMILIES, make_tiny_model, save_random

WEIGHTS = "model.safetensors"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
QUANTIZATIONS: tuple[tuple[Quantization, Bits], ...] = (("int8", 8), ("int4", 4))


@pytest.mark.parametrize(("quantization", "bits"), QUANTIZATIONS)
@pytest.mark.parametrize("family", ["llama", "llama-bias", "llama-mqa", "qwen2", "qwen3", "mistral-sliding"])
def test_greedy_tokens_are_those_of_the_widened_weights(
    family: str, quantization: Quantization, bits: Bits, tmp_path: Path
) -> None:
    make_tiny_model(family, tmp_path / "model")
    loaded = load(tmp_path / "model", quantization)
    reference = Reference(_widened(tmp_path / "model", tmp_path / "widened", bits))
    prompt = torch.randint(0, 320, (75,), generator=torch.Generator().manual_seed(1)).tolist()
    check_greedy(loaded.model, reference, prompt, num_tokens=24)


@pytest.mark.parametrize(("quantization", "bits"), QUANTIZATIONS)
def test_the_demo_model_in_bfloat16_follows_the_widened_weights(
    quantization: Quantization, bits: Bits, tmp_path: Path
) -> None:
    """Nodes have bfloat16 activations, with many rows in a prompt and one row in a decode step."""
    loaded = load(DEMO_MODEL, quantization, dtype="bfloat16")
    reference = Reference(_widened(DEMO_MODEL, tmp_path, bits))
    generator = torch.Generator().manual_seed(2)
    prompt = torch.randint(0, loaded.config.vocab_size, (100,), generator=generator).tolist()
    expected = reference.logits(prompt)
    run = PagedRun(loaded.model, num_sequences=1, max_tokens=100)
    logits = torch.cat([run.step([prompt[:90]])[0], *(run.step([[token]])[0] for token in prompt[90:])])
    similarity = torch.nn.functional.cosine_similarity(logits, expected)
    assert similarity.min() > 0.995
    # No further from them than bfloat16 weights are from the float32 model, give or take.
    plain = PagedRun(load(DEMO_MODEL, "none", dtype="bfloat16").model, num_sequences=1, max_tokens=100)
    rounding = (plain.step([prompt])[0] - Reference(DEMO_MODEL).logits(prompt)).abs().mean()
    assert (logits - expected).abs().mean() < 2 * rounding


def test_int8_stays_close_to_the_model_itself() -> None:
    prompt = list(range(300, 360))
    exact = _step(load(DEMO_MODEL, "none"), prompt)
    assert torch.nn.functional.cosine_similarity(_step(load(DEMO_MODEL, "int8"), prompt), exact).min() > 0.999
    assert torch.nn.functional.cosine_similarity(_step(load(DEMO_MODEL, "int4"), prompt), exact).mean() > 0.97


def test_every_quantization_has_a_fingerprint_of_its_own(tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path)
    quantizations: tuple[Quantization, ...] = ("none", "int8", "int4")
    assert len({load(tmp_path, quantization).fingerprint for quantization in quantizations}) == 3
    assert load(tmp_path, "int8").fingerprint == load(tmp_path, "int8").fingerprint


def test_shards_in_any_order_give_the_same_weights(tmp_path: Path) -> None:
    config = FAMILIES["llama-bias"]()
    config.vocab_size = 320
    one = load(save_random(config, tmp_path / "one"), "int4").model
    many = load(save_random(config, tmp_path / "many", max_shard_size="60KB"), "int4").model
    for ours, theirs in zip(one.layers, many.layers, strict=True):
        qkv, other = ours.attention.qkv, theirs.attention.qkv
        assert isinstance(qkv, QuantizedLinear) and isinstance(other, QuantizedLinear)
        assert torch.equal(qkv.weight.packed, other.weight.packed)
        assert torch.equal(qkv.weight.scales, other.weight.scales)


def test_one_tensor_at_a_time_is_open_while_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak of memory is the packed weights and the largest tensor in full."""
    make_tiny_model("llama", tmp_path)
    full_sizes: list[int] = []

    def counting(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def counted(self: WeightFormat, *shape: int) -> Tensor:
            memory = make(self, *shape)
            if len(shape) == 2 and not memory.is_meta:
                full_sizes.append(memory.nbytes)
            return memory

        return counted

    monkeypatch.setattr(WeightFormat, "empty", counting(WeightFormat.empty))
    monkeypatch.setattr(WeightFormat, "scratch", counting(WeightFormat.scratch))
    progress: list[tuple[int, int]] = []
    loaded = load_model(
        str(tmp_path),
        dtype="auto",
        attention=select_backend("reference"),
        max_model_len=None,
        quantization="int8",
        progress=lambda done, total: progress.append((done, total)),
    )
    stored = load_file(tmp_path / WEIGHTS)
    matrices = sorted(tensor.nbytes for tensor in stored.values() if tensor.ndim == 2)
    assert sorted(full_sizes) == matrices  # each of them once, on its own: no merged copy in full
    assert progress[0][0] == 0 and progress[-1][0] == progress[-1][1]
    assert [size for size, _ in progress] == sorted(size for size, _ in progress)
    assert isinstance(loaded.model.lm_head, QuantizedLinear) and loaded.model.lm_head.weight.bits == 8


def test_quantising_for_a_gpu_is_refused(tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path)
    with pytest.raises(ConfigurationError, match="quantization int8 is for CPUs"):
        load_model(
            str(tmp_path),
            dtype="auto",
            attention=select_backend("reference"),
            max_model_len=None,
            quantization="int8",
            device=torch.device("meta"),
        )


def _step(loaded: LoadedModel, prompt: list[int]) -> Tensor:
    return PagedRun(loaded.model, num_sequences=1, max_tokens=len(prompt)).step([prompt])[0]


def _widened(source: Path, target: Path, bits: Bits) -> Path:
    """Writes the checkpoint with every quantised matrix replaced by its integers times its scales, in float32."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    tensors = {name: tensor.float() for name, tensor in load_file(source / WEIGHTS).items()}
    tensors.setdefault(HEAD, tensors[EMBEDDING].clone())
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and name != EMBEDDING:
            tensors[name] = _requantized(tensor, 8 if name == HEAD else bits)
    save_file(tensors, target / WEIGHTS, metadata={"format": "pt"})
    fields = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(
        json.dumps(fields | {"tie_word_embeddings": False, "dtype": "float32", "torch_dtype": "float32"})
    )
    return target


def _requantized(tensor: Tensor, bits: Bits) -> Tensor:
    weight = empty_weight(tensor.shape[0], tensor.shape[1], bits)
    assert weight.group_size == GROUP_SIZES[bits]
    quantized_reference.pack_rows(weight, tensor, 0)
    return quantized_reference.dequantize(weight, torch.float32).contiguous()
