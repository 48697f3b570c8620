"""Which checkpoints have one tensor for the embedding and the head: the weights say it, not the configuration alone."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvrelay.core.config.option_types import DTypeName, Quantization
from kvrelay.core.errors import ModelLoadError
from kvrelay.engine.loading.loader import LoadedModel
from tests.engine.load_on_cpu import load
from tests.engine.paged_run import PagedRun, check_greedy
from tests.engine.reference import Reference
from tests.engine.tiny_models import make_tiny_model

WEIGHTS = "model.safetensors"
PROMPT = list(range(3, 60))


def logits(loaded: LoadedModel) -> torch.Tensor:
    return PagedRun(loaded.model, num_sequences=1, max_tokens=len(PROMPT)).step([PROMPT])[0]


def test_a_head_that_is_not_the_embedding_is_used_although_the_configuration_ties_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Adapters that trained the head leave such checkpoints when they are merged."""
    make_tiny_model("llama-tied", tmp_path)
    tied = load(tmp_path, dtype="auto").fingerprint
    tensors = load_file(tmp_path / WEIGHTS)
    head = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(tensors | {"lm_head.weight": head}, tmp_path / WEIGHTS, metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING):
        loaded = load(tmp_path, dtype="auto")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "tie_word_embeddings" in caplog.text and "lm_head.weight" in caplog.text
    assert loaded.fingerprint != tied and not loaded.config.tie_word_embeddings
    check_greedy(loaded.model, Reference(tmp_path), list(range(40)), num_tokens=4)


def test_a_head_in_another_shard_and_dtype_is_tied_if_its_values_are_those_of_the_embedding(tmp_path: Path) -> None:
    make_tiny_model("llama-tied", tmp_path, dtype=torch.bfloat16)
    tensors = load_file(tmp_path / WEIGHTS)
    (tmp_path / WEIGHTS).unlink()
    save_file(tensors, tmp_path / "a.safetensors")
    save_file({"lm_head.weight": tensors["model.embed_tokens.weight"].float()}, tmp_path / "b.safetensors")
    weight_map = dict.fromkeys(tensors, "a.safetensors") | {"lm_head.weight": "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert load(tmp_path, dtype="auto").config.tie_word_embeddings


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])  # by the file, with a head that is packed
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_tied_embedding_may_be_stored_as_the_head_alone(
    tmp_path: Path, dtype: DTypeName, quantization: Quantization, caplog: pytest.LogCaptureFixture
) -> None:
    make_tiny_model("llama-tied", tmp_path, dtype=torch.bfloat16)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "dtype": None}))
    expected = logits(load(tmp_path, quantization, dtype=dtype))
    tensors = load_file(tmp_path / WEIGHTS)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})
    loaded = load(tmp_path, quantization, dtype=dtype)
    assert loaded.config.tie_word_embeddings and not caplog.records
    assert torch.equal(logits(loaded), expected)
    if quantization == "none" and dtype == "auto":
        stored = Reference(tmp_path).logits(PROMPT)
        assert torch.nn.functional.cosine_similarity(expected.float(), stored).min() > 0.99


def test_a_head_alone_is_no_embedding_if_they_are_not_tied(tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"^tensor model\.embed_tokens\.weight is missing"):
        load(tmp_path, dtype="auto")


def test_a_head_and_an_embedding_that_are_no_matrices_are_refused_by_name(tmp_path: Path) -> None:
    make_tiny_model("llama-tied", tmp_path)
    number = torch.tensor(1.0)
    numbers = {"model.embed_tokens.weight": number, "lm_head.weight": number.clone()}
    save_file(load_file(tmp_path / WEIGHTS) | numbers, tmp_path / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"model\.embed_tokens\.weight"):
        load(tmp_path, dtype="auto")
