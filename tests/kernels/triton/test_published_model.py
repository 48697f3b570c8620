"""AWQ's and GPTQ's checkpoints on the kernel that reads them as published: whole models against transformers."""

from pathlib import Path

import pytest
import torch
from paged_kernels.published_weight import PublishedWeight
from paged_kernels.reference import ReferenceBackend
from paged_kernels.weight_memory import WeightMemory
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvrelay.engine.layers import published_linear
from kvrelay.engine.layers.published_linear import PublishedLinear, TritonProduct
from kvrelay.engine.models.loader import load_model
from tests.engine.paged_run import PagedRun
from tests.engine.published_models import make_published_model


def _on_cpu_tensors(weight: PublishedWeight, memory: WeightMemory) -> TritonProduct:
    """Interpreted."""
    return TritonProduct(weight)


@pytest.mark.parametrize(
    ("family", "recipe"), [("qwen2", "awq-64"), ("llama-bias", "gptq-32-orders"), ("llama", "gptq-64-8-bits")]
)
def test_greedy_tokens_are_those_of_the_meant_weights(
    family: str, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published_linear, "product_for", _on_cpu_tensors)
    model = make_published_model(family, recipe, tmp_path)
    loaded = load_model(str(model.directory), dtype="float32", attention=ReferenceBackend(), max_model_len=None)
    down = loaded.model.layers[0].mlp.down
    assert isinstance(down, PublishedLinear) and isinstance(down._products[0][0], TritonProduct)
    oracle: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        model.meant, attn_implementation="eager", dtype=torch.float32
    )
    tokens = list(range(40, 70))
    run = PagedRun(loaded.model, num_sequences=1, max_tokens=34)
    logits = run.step([tokens])[0]
    for _ in range(3):
        tokens.append(int(logits[-1].argmax()))
        logits = run.step([tokens[-1:]])[0]
    with torch.inference_mode():
        expected = oracle(torch.tensor([tokens])).logits[0]
    assert tokens[30:] == expected[29:-1].argmax(dim=-1).tolist()
    torch.testing.assert_close(logits[-1], expected[-1], atol=2e-4, rtol=2e-4)
