"""The compiled stack of decoder layers gives the results of the layers one by one, to the bit."""

import sys
from pathlib import Path

import pytest
import torch
from paged_kernels import _native
from paged_kernels.base import AttentionMetadata, LastTokens
from paged_kernels.cpu.layer_stack import LayerStack, StackedLayer, projection
from paged_kernels.kv_scales import FP8, KVScales
from paged_kernels.reference import ReferenceBackend
from paged_kernels.registry import select_backend
from torch import Tensor

from kvrelay.core.config.option_types import DTypeName, Quantization
from kvrelay.engine.layers import layer_stack
from kvrelay.engine.models.decoder import DecoderForCausalLM
from tests.engine import load_on_cpu
from tests.engine.paged_run import PagedRun
from tests.engine.prequantized_models import make_prequantized_model
from tests.engine.tiny_models import make_tiny_model

QUANTIZATIONS: tuple[Quantization, ...] = ("none", "int8", "int4")


def load(directory: Path, quantization: Quantization, dtype: DTypeName = "bfloat16") -> DecoderForCausalLM:
    return load_on_cpu.load(directory, quantization, dtype=dtype).model


def logits_and_kv(model: DecoderForCausalLM, kv_dtype: torch.dtype | None = None) -> Tensor:
    """Runs prompts of many rows, of which all, some or no results are read, and steps of one and of two tokens."""
    run = PagedRun(model, num_sequences=2, max_tokens=64)
    if kv_dtype is not None:
        run.pool = run.pool.to(kv_dtype)
    steps: list[tuple[list[list[int]], tuple[int, ...] | None]] = [
        ([list(range(270, 315)), [5, 6]], None),
        ([[7], [9]], None),
        ([[11, 12], [13]], None),
        ([[14, 15, 16, 17], [18, 19]], (1,)),
        ([[20, 21], [22] * 35], ()),
        ([[23], [24] * 10], (0, 1)),
    ]
    parts = [part for chunks, last_of in steps for part in run.step(chunks, last_of)]
    return torch.cat([part.flatten() for part in parts] + [run.pool.float().nan_to_num().flatten()])


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("family", ["llama-bias", "llama-mqa", "qwen2", "qwen3-bias-sliding"])
def test_the_stack_equals_the_layers_one_by_one(family: str, quantization: Quantization, tmp_path: Path) -> None:
    model = load(make_tiny_model(family, tmp_path), quantization)
    assert model.stack is not None
    compiled = logits_and_kv(model)
    model.stack = None
    assert torch.equal(logits_and_kv(model), compiled)


@pytest.mark.parametrize("recipe", ["awq-32", "gptq-64"])
def test_the_stack_equals_the_layers_with_prequantized_weights(recipe: str, tmp_path: Path) -> None:
    model = load(make_prequantized_model("llama-bias", recipe, tmp_path).directory, "none")
    assert model.stack is not None
    compiled = logits_and_kv(model)
    model.stack = None
    assert torch.equal(logits_and_kv(model), compiled)


def test_the_stack_equals_the_layers_over_an_fp8_pool(tmp_path: Path) -> None:
    model = load(make_tiny_model("llama", tmp_path), "int8")
    assert model.stack is not None
    with pytest.raises(ValueError, match="needs kv_scales"):
        logits_and_kv(model, FP8)
    shape = (model.config.num_layers, model.config.num_kv_heads)
    scales = KVScales(torch.linspace(0.01, 0.02, shape[0] * shape[1]).view(shape), torch.full(shape, 0.03))
    model.attend_with(select_backend("auto", kv_scales=scales))
    compiled = logits_and_kv(model, FP8)
    model.stack = None
    assert torch.equal(logits_and_kv(model, FP8), compiled)


def test_models_that_the_kernels_do_not_support_have_no_stack(tmp_path: Path) -> None:
    scattered = make_prequantized_model("llama", "gptq-32-order", tmp_path / "scattered")
    assert load(scattered.directory, "none").stack is None
    assert load(make_tiny_model("llama", tmp_path), "int8", "float32").stack is None
    model = load(make_tiny_model("llama", tmp_path), "int8")
    model.attend_with(ReferenceBackend())
    assert model.stack is None


def test_without_the_compiled_kernels_there_is_no_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(make_tiny_model("llama", tmp_path), "int8")
    monkeypatch.setattr(layer_stack, "load_extension", lambda: None)
    monkeypatch.setitem(sys.modules, "paged_kernels.cpu.layer_stack", None)  # it cannot be imported any more
    model.attend_with(ReferenceBackend())
    assert model.stack is None


def linear(num_outputs: int, num_inputs: int) -> _native.Projection:
    """Returns an int8 projection whose weights are all zero."""
    groups = -(-num_inputs // 128)
    return _native.quantized_projection(
        torch.zeros(-(-num_outputs // 16), groups * 128 * 16, dtype=torch.uint8),
        torch.zeros(-(-num_outputs // 16), groups, 16, dtype=torch.bfloat16),
        None, None, num_outputs, num_inputs, 8, 128,
    )  # fmt: skip


def stack(qkv: _native.Projection, norm: Tensor) -> LayerStack:
    """Returns one layer of two query heads and one KV head, with head_dim 16 and hidden size 32."""
    layer = StackedLayer(
        qkv=qkv, output=linear(32, 32), gate_up=linear(128, 32), down=linear(32, 64), input_norm=norm, norm=norm,
        query_norm=None, key_norm=None, window=None,
    )  # fmt: skip
    return LayerStack(
        [layer], final_norm=norm, eps=1e-6, scale=0.25, num_heads=2, num_kv_heads=1, head_dim=16, kv_scales=None
    )


def test_layers_that_do_not_fit_are_refused() -> None:
    norm = torch.ones(32, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="layers do not fit together"):
        stack(linear(48, 32), norm)
    packed, scales = torch.zeros(1, 2048, dtype=torch.uint8), torch.zeros(1, 1, 16)
    with pytest.raises(ValueError, match="another number of bytes"):
        _native.quantized_projection(packed[:, :16], scales.bfloat16(), None, None, 16, 64, 8, 128)
    with pytest.raises(ValueError, match="zeros differ from scales in shape"):
        _native.quantized_projection(packed, scales, torch.zeros(1, 2, 16).bfloat16(), None, 16, 64, 8, 128)
    with pytest.raises(ValueError, match="a panel for every 32 outputs"):
        _native.packed_projection(torch.zeros(2, 1024, dtype=torch.bfloat16), None, 32, 32)
    assert projection(torch.zeros(4, 4), None) is None


def test_tensors_that_do_not_fit_are_refused() -> None:
    few = stack(linear(64, 32), torch.ones(32, dtype=torch.bfloat16))
    x, angles = torch.zeros(2, 32, dtype=torch.bfloat16), torch.zeros(2, 8)
    pool = torch.zeros(3, 1, 1, 2, 8, 16, dtype=torch.bfloat16)

    def run(
        x: Tensor = x,
        angles: Tensor = angles,
        pool: Tensor = pool,
        slots: tuple[int, ...] = (0, 8),
        last_rows: tuple[int, ...] | None = None,
    ) -> Tensor:
        metadata = AttentionMetadata(
            slot_mapping=torch.tensor(slots),
            block_tables=torch.tensor([[0], [1]], dtype=torch.int32),
            query_start_loc=torch.tensor([0, 1, 2], dtype=torch.int32),
            seq_lens=torch.tensor([1, 1], dtype=torch.int32),
            max_query_len=1,
            max_seq_len=1,
        )
        last = None if last_rows is None else LastTokens(torch.tensor(last_rows), metadata)
        return few(x.clone(), angles, angles, pool, metadata, last)

    assert run().shape == (2, 32)
    with pytest.raises(ValueError, match="shapes do not fit"):
        run(x=x[:, :16].contiguous())
    with pytest.raises(ValueError, match="hidden has another element type"):
        run(x=x.float())
    with pytest.raises(ValueError, match="one row per token"):
        run(angles=angles[:1])
    with pytest.raises(ValueError, match="another number of layers"):
        run(pool=torch.zeros(3, 1, 2, 2, 8, 16, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="the pool has other heads"):
        run(pool=torch.zeros(3, 2, 1, 2, 8, 16, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="kv_pool has another element type"):
        run(pool=pool.float())
    with pytest.raises(ValueError, match="differ in tokens"):
        run(slots=(0,))
    with pytest.raises(IndexError):
        run(slots=(0, 24))
    for rows in ((1, 0), (0, 0), (0, 2), (-1, 0)):
        with pytest.raises(ValueError, match="not ascending rows"):
            run(last_rows=rows)
    assert not pool.any()
