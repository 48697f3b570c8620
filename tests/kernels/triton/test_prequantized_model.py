"""AWQ's and GPTQ's checkpoints as the GPU multiplies with them, as published: whole models against transformers."""

from pathlib import Path

import pytest
import torch
from paged_kernels.cpu.weight_memory import WeightMemory
from paged_kernels.prequantized_weight import PrequantizedWeight
from paged_kernels.reference import ReferenceBackend

from kvrelay.core.config.option_types import DTypeName
from kvrelay.engine.layers import prequantized_linear
from kvrelay.engine.layers.prequantized_linear import PrequantizedLinear, TritonProduct
from kvrelay.engine.loading.loader import load_model
from kvrelay.engine.models.decoder import DecoderForCausalLM
from tests.engine.paged_run import PagedRun, check_greedy
from tests.engine.prequantized_models import PrequantizedModel, make_prequantized_model
from tests.engine.reference import Reference


def _on_cpu_tensors(weight: PrequantizedWeight, memory: WeightMemory) -> TritonProduct:
    """Returns the product of a GPU, for tensors on the CPU, where Triton interprets it."""
    return TritonProduct(weight)


@pytest.fixture(params=[("qwen2", "awq-64"), ("llama-bias", "gptq-32-orders"), ("llama", "gptq-64-8-bits")])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PrequantizedModel:
    monkeypatch.setattr(prequantized_linear, "product_for", _on_cpu_tensors)
    family, recipe = request.param
    return make_prequantized_model(family, recipe, tmp_path)


def _load(checkpoint: PrequantizedModel, dtype: DTypeName) -> DecoderForCausalLM:
    loaded = load_model(str(checkpoint.directory), dtype=dtype, attention=ReferenceBackend(), max_model_len=None)
    down = loaded.model.layers[0].mlp.down
    assert isinstance(down, PrequantizedLinear) and isinstance(down._products[0][0], TritonProduct)
    return loaded.model


def test_greedy_tokens_are_those_of_the_meant_weights(checkpoint: PrequantizedModel) -> None:
    check_greedy(_load(checkpoint, "float32"), Reference(checkpoint.meant), range(40, 70), num_tokens=3)


def test_logits_of_float16_are_close(checkpoint: PrequantizedModel) -> None:
    """Here the kernel multiplies, in float32 torch."""
    prompt = range(40, 70)
    [logits] = PagedRun(_load(checkpoint, "float16"), num_sequences=1, max_tokens=len(prompt)).step([prompt])
    torch.testing.assert_close(logits, Reference(checkpoint.meant).logits(prompt), atol=0.06, rtol=0.0)
