"""AWQ's and GPTQ's checkpoints on the kernel that reads them as published: whole models against transformers."""

from pathlib import Path

import pytest
from paged_kernels.cpu.weight_memory import WeightMemory
from paged_kernels.prequantized_weight import PrequantizedWeight
from paged_kernels.reference import ReferenceBackend

from kvrelay.engine.layers import prequantized_linear
from kvrelay.engine.layers.prequantized_linear import PrequantizedLinear, TritonProduct
from kvrelay.engine.loading.loader import load_model
from tests.engine.paged_run import check_greedy
from tests.engine.prequantized_models import make_prequantized_model
from tests.engine.reference import Reference


def _on_cpu_tensors(weight: PrequantizedWeight, memory: WeightMemory) -> TritonProduct:
    """Returns the product of a GPU, for tensors on the CPU, where Triton interprets it."""
    return TritonProduct(weight)


@pytest.mark.parametrize(
    ("family", "recipe"), [("qwen2", "awq-64"), ("llama-bias", "gptq-32-orders"), ("llama", "gptq-64-8-bits")]
)
def test_greedy_tokens_are_those_of_the_meant_weights(
    family: str, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prequantized_linear, "product_for", _on_cpu_tensors)
    model = make_prequantized_model(family, recipe, tmp_path)
    loaded = load_model(str(model.directory), dtype="float32", attention=ReferenceBackend(), max_model_len=None)
    down = loaded.model.layers[0].mlp.down
    assert isinstance(down, PrequantizedLinear) and isinstance(down._products[0][0], TritonProduct)
    check_greedy(loaded.model, Reference(model.meant), range(40, 70), num_tokens=3)
