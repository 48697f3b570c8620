"""A node uses weights that another node has loaded only if they are those it would have loaded itself."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvrelay.core.config.option_types import DTypeName, Quantization
from kvrelay.core.errors import ModelLoadError
from kvrelay.core.process.weight_store import WeightStore
from kvrelay.engine.loading.loader import LoadedModel
from tests.engine import load_on_cpu
from tests.engine.paged_run import PagedRun
from tests.engine.prequantized_models import make_prequantized_model
from tests.engine.tiny_models import make_tiny_model

WEIGHTS = "model.safetensors"
PROMPT = [5, 17, 250, 3, 3, 99]


@pytest.fixture
def store() -> Iterator[WeightStore]:
    descriptor = WeightStore.create()
    yield WeightStore(descriptor)
    os.close(descriptor)


def load(
    directory: Path, store: WeightStore | None, *, dtype: DTypeName = "bfloat16", quantization: Quantization = "none"
) -> LoadedModel:
    return load_on_cpu.load(directory, quantization, dtype=dtype, weight_store=store)


def logits(loaded: LoadedModel) -> Tensor:
    return PagedRun(loaded.model, num_sequences=1, max_tokens=len(PROMPT)).step([PROMPT])[0]


def overwrite_weights(directory: Path, *, later: bool = False) -> None:
    """Overwrites the weights with zeros. A listing of the directory shows nothing of it, except the time with
    `later`."""
    path = directory / WEIGHTS
    before = path.stat()
    header_bytes = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    with path.open("r+b") as file:
        file.seek(header_bytes)
        file.write(bytes(before.st_size - header_bytes))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + later))


def copied_kib() -> int:
    """Returns how much of the store's memory this process has copied by writing to it, in KiB."""
    sizes = list[str]()
    is_of_store = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_of_store = "memfd:kvrelay-weights" in line and line.split()[1].endswith("p")  # mapped privately
        elif is_of_store and line.startswith("Anonymous:"):
            sizes.append(line.split()[1])
    assert sizes
    return sum(map(int, sizes))


@pytest.mark.parametrize(
    ("family", "dtype", "quantization"),
    [
        ("llama", "float32", "none"),
        ("llama", "bfloat16", "none"),
        ("qwen2", "bfloat16", "none"),
        ("qwen3", "bfloat16", "none"),
        ("llama", "bfloat16", "int8"),
        ("qwen2", "bfloat16", "int4"),
    ],
)
def test_the_second_node_reads_no_weights(
    family: str, dtype: DTypeName, quantization: Quantization, tmp_path: Path, store: WeightStore
) -> None:
    make_tiny_model(family, tmp_path)
    alone = load(tmp_path, None, dtype=dtype, quantization=quantization)
    first = load(tmp_path, store, dtype=dtype, quantization=quantization)
    overwrite_weights(tmp_path)
    second = load(tmp_path, store, dtype=dtype, quantization=quantization)
    assert first.fingerprint == second.fingerprint == alone.fingerprint
    expected = logits(alone)
    assert torch.equal(logits(first), expected) and torch.equal(logits(second), expected)
    assert copied_kib() == 0


def test_writes_of_the_second_node_do_not_reach_the_first(tmp_path: Path, store: WeightStore) -> None:
    make_tiny_model("qwen2", tmp_path)
    first = load(tmp_path, store)
    expected = logits(first)
    second = load(tmp_path, store)
    second.model.norm.zero_()
    assert copied_kib() > 0
    assert not torch.equal(logits(second), expected)
    assert torch.equal(logits(first), expected)


def test_after_a_load_that_failed_the_next_one_begins_again(tmp_path: Path, store: WeightStore) -> None:
    make_tiny_model("llama", tmp_path)
    intact = (tmp_path / WEIGHTS).read_bytes()
    tensors = load_file(tmp_path / WEIGHTS)
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(ModelLoadError, match=re.escape("model.norm.weight")):
        load(tmp_path, store)
    (tmp_path / WEIGHTS).write_bytes(intact)
    assert torch.equal(logits(load(tmp_path, store)), logits(load(tmp_path, None)))


@pytest.mark.parametrize("change", ["other quantization", "other dtype", "other files", "later files", "other model"])
def test_weights_of_other_files_or_formats_are_not_used(
    change: str, tmp_path: Path, store: WeightStore, caplog: pytest.LogCaptureFixture
) -> None:
    make_tiny_model("llama", tmp_path)
    if change == "other model":
        tensors = load_file(tmp_path / WEIGHTS)
        save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, tmp_path / WEIGHTS)
    load(tmp_path, store)
    dtype: DTypeName = "float32" if change == "other dtype" else "bfloat16"
    quantization: Quantization = "int8" if change == "other quantization" else "none"
    if change == "other files":
        tensors = load_file(tmp_path / WEIGHTS)
        save_file({name: tensor * 2 for name, tensor in tensors.items()}, tmp_path / WEIGHTS)
    elif change == "later files":
        overwrite_weights(tmp_path, later=True)
    elif change == "other model":  # whose embedding is its head, and lies elsewhere
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    found = load(tmp_path, store, dtype=dtype, quantization=quantization)
    alone = load(tmp_path, None, dtype=dtype, quantization=quantization)
    assert found.fingerprint == alone.fingerprint and torch.equal(logits(found), logits(alone))
    assert "not those of this model" in caplog.text


def test_a_quantised_checkpoint_is_loaded_by_every_node(tmp_path: Path, store: WeightStore) -> None:
    """Its repacked weights are not shared."""
    directory = make_prequantized_model("llama", "awq-64", tmp_path).directory
    first, second = load(directory, store, dtype="float32"), load(directory, store, dtype="float32")
    assert first.fingerprint == second.fingerprint and torch.equal(logits(first), logits(second))
    with store.turn(lambda: None):
        assert not store.note()
