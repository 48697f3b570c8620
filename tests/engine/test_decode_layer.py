"""A decoder layer in two compiled calls around its attention gives its pieces' results to the bit."""

from pathlib import Path

import pytest
import torch
from paged_kernels import _native
from paged_kernels.decode_layer import DecodeLayer, projection
from paged_kernels.registry import select_backend
from torch import Tensor

from kvrelay.engine.layers.weight_format import Quantization
from kvrelay.engine.models.decoder import DecoderForCausalLM
from kvrelay.engine.models.loader import DTypeName, load_model
from tests.engine.paged_run import PagedRun
from tests.engine.tiny_models import make_tiny_model

QUANTIZATIONS: tuple[Quantization, ...] = ("none", "int8", "int4")


def load(directory: Path, quantization: Quantization, dtype: DTypeName = "bfloat16") -> DecoderForCausalLM:
    return load_model(
        str(directory), dtype=dtype, attention=select_backend("auto"), max_model_len=64, quantization=quantization
    ).model


def logits(model: DecoderForCausalLM) -> Tensor:
    """Prompts of many rows, and steps of one and of two tokens."""
    run = PagedRun(model, num_sequences=2, max_tokens=64)
    chunks = [[list(range(270, 315)), [5, 6]], [[7], [9]], [[11, 12], [13]]]
    return torch.cat([part for step in chunks for part in run.step(step)])


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("family", ["llama-bias", "llama-mqa", "qwen2", "qwen3-bias-sliding"])
def test_the_same_as_piece_by_piece(family: str, quantization: Quantization, tmp_path: Path) -> None:
    model = load(make_tiny_model(family, tmp_path), quantization)
    if quantization != "none":  # bfloat16 weights need an order of oneDNN's that not every processor has
        assert all(layer.compiled is not None for layer in model.layers)
    together = logits(model)
    for layer in model.layers:
        layer.compiled = None
    assert torch.equal(logits(model), together)


def test_float32_goes_piece_by_piece(tmp_path: Path) -> None:
    model = load(make_tiny_model("llama", tmp_path), "int8", "float32")
    assert all(layer.compiled is None for layer in model.layers)


def test_tensors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    [layer, *_] = load(make_tiny_model("llama", tmp_path), "int8").layers
    compiled = layer.compiled
    assert isinstance(compiled, DecodeLayer)
    x, angles = torch.zeros(2, 64, dtype=torch.bfloat16), torch.zeros(2, 8)
    heads, residual = compiled.heads(x, None, angles, angles)
    assert heads.shape == (2, 8, 16)
    attended = torch.zeros(2, 64, dtype=torch.bfloat16)
    assert compiled.finish(attended, residual)[0].shape == (2, 64)
    with pytest.raises(ValueError, match="shapes do not fit"):
        compiled.heads(x[:, :32].contiguous(), None, angles, angles)
    with pytest.raises(ValueError, match="a row of angles per token"):
        compiled.heads(x, None, angles[:1], angles)
    with pytest.raises(ValueError, match="residual has another element type"):
        compiled.finish(attended, residual.float())
    with pytest.raises(ValueError, match="attended is not contiguous"):
        compiled.finish(torch.zeros(2, 128, dtype=torch.bfloat16)[:, :64], residual)
    with pytest.raises(ValueError, match="another number of bytes"):
        _native.quantized_projection(
            torch.zeros(1, 16, dtype=torch.uint8), torch.zeros(1, 1, 16, dtype=torch.bfloat16), None, 16, 64, 8, 128
        )
    with pytest.raises(ValueError, match="a panel for every 32 outputs"):
        _native.packed_projection(torch.zeros(2, 1024, dtype=torch.bfloat16), None, 32, 32)
    assert projection(torch.zeros(4, 4), None) is None
