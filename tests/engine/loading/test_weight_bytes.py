"""Weights that do not fit into memory are refused before any of it is taken, and no others are."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from paged_kernels.cpu.weight_memory import WeightMemory
from paged_kernels.reference import ReferenceBackend
from torch import Tensor

from kvrelay.core.config.option_types import DTypeName, Quantization
from kvrelay.core.errors import ConfigurationError
from kvrelay.core.process.weight_store import WeightStore
from kvrelay.engine.loading import weight_bytes
from kvrelay.engine.loading.loader import load_model
from tests.engine.load_on_cpu import load
from tests.engine.prequantized_models import make_prequantized_model
from tests.engine.tiny_models import make_tiny_model

ROOT = Path(__file__).parents[3]
# Room for nothing but the small things that a load needs, whereas memory for weights comes in chunks of 64 MiB.
UNDER_A_LIMIT = """
import re, resource, sys
from pathlib import Path
from kvrelay.core.errors import ConfigurationError
from kvrelay.core.process.weight_store import WeightStore
from tests.engine.load_on_cpu import load

load(Path(sys.argv[1]))  # whatever is needed once
taken = int(re.search(r"VmSize:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (taken + (32 << 20), resource.RLIM_INFINITY))
for store in (None, WeightStore(WeightStore.create())):
    try:
        load(Path(sys.argv[1]), weight_store=store)
    except ConfigurationError as error:
        print(error)
"""


def have(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the machine one on which no more can be had."""
    monkeypatch.setattr(weight_bytes, "most_memory", lambda: num_bytes)


@pytest.mark.parametrize("family", ["llama-bias", "qwen2"])  # whose head is the embedding
@pytest.mark.parametrize(
    ("dtype", "quantization", "remedy"),
    [
        ("float32", "none", "set dtype to bfloat16 or quantization to int8 or int4, or take a smaller model"),
        ("bfloat16", "none", "set quantization to int8 or int4, or take a smaller model"),
        ("bfloat16", "int8", "take a smaller model"),
        ("float32", "int4", "set dtype to bfloat16, or take a smaller model"),
    ],
)
def test_a_model_is_refused_if_one_byte_is_missing(
    family: str,
    dtype: DTypeName,
    quantization: Quantization,
    remedy: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_tiny_model(family, tmp_path)
    taken = list[int]()
    take = WeightMemory.take

    def recording(memory: WeightMemory, num_bytes: int) -> Tensor:
        taken.append(num_bytes)
        return take(memory, num_bytes)

    monkeypatch.setattr(WeightMemory, "take", recording)
    load(tmp_path, quantization, dtype=dtype)
    needed = sum(taken)
    have(needed, monkeypatch)
    load(tmp_path, quantization, dtype=dtype)
    have(needed - 1, monkeypatch)
    taken.clear()
    with pytest.raises(ConfigurationError, match=rf"^the weights of {tmp_path} take 0\.0 GB as .*: {remedy}, or end"):
        load(tmp_path, quantization, dtype=dtype)
    assert not taken


@pytest.mark.parametrize("recipe", ["awq-64", "gptq-32-order", "gptq-64-8-bits"])
def test_a_quantised_checkpoint_takes_at_least_its_codes(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_prequantized_model("llama", recipe, tmp_path).directory
    size = (directory / "model.safetensors").stat().st_size
    have(size, monkeypatch)
    load(directory)
    have(size * 3 // 4, monkeypatch)
    with pytest.raises(ConfigurationError, match=r"(awq|gptq), . bits, .* and float32, .*: set dtype to bfloat16, or"):
        load(directory)


def test_weights_that_another_node_has_loaded_take_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny_model("llama", tmp_path)
    store = WeightStore(WeightStore.create())
    try:
        load(tmp_path, weight_store=store)
        have(0, monkeypatch)
        load(tmp_path, weight_store=store)
        with pytest.raises(ConfigurationError, match=r"take .* as float32, but of the memory"):
            load(tmp_path)
        with pytest.raises(ConfigurationError, match=r"take .* as bfloat16, but of the memory"):
            load(tmp_path, dtype="bfloat16", weight_store=store)
    finally:
        os.close(store.descriptor)


def test_memory_that_the_system_refuses_is_named_with_what_to_do(tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path)
    command = [sys.executable, "-c", UNDER_A_LIMIT, str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    refused = rf"the weights of {re.escape(str(tmp_path))} take 0\.0 GB as float32, which the system refuses: set dtype"
    private, shared = ended.stdout.splitlines()
    assert re.match(refused, private) and "DefaultCPUAllocator" in private
    assert re.match(refused, shared)


def test_other_errors_while_loading_stay_what_they_are(tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path)

    def fail(done: int, total: int) -> None:
        raise RuntimeError("no matter of memory")

    with pytest.raises(RuntimeError, match=r"^no matter of memory$"):
        load_model(str(tmp_path), dtype="auto", attention=ReferenceBackend(), max_model_len=None, progress=fail)
