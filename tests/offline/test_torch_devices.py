"""A program that has chosen where torch makes its tensors, its current GPU, or autocast: `LLM` works as in any other,
and the choice stays."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from kvrelay import LLM, SamplingParams
from kvrelay.engine.engine import Engine
from kvrelay.engine.layers.rotary import RopeKind, RopeParameters, inverse_frequencies
from kvrelay.engine.startup import prepare_engine
from kvrelay.offline.torch_devices import devices_set_for
from tests.demo_model import DEMO_MODEL

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


def _check_that_llm_works(llm: LLM) -> None:
    [result] = llm.generate("The capital of France is", GREEDY, progress=False)
    assert result.outputs[0].text.startswith(" Paris")
    llm._engine.check_idle()
    assert torch.get_default_device().type == "meta"


def test_a_default_device_is_neither_used_nor_changed() -> None:
    """Tensors on `meta` have no data."""
    before = LLM(DEMO_MODEL, threads=1, num_blocks=64)
    torch.set_default_device("meta")
    try:
        _check_that_llm_works(before)
        _check_that_llm_works(LLM(DEMO_MODEL, threads=1, num_blocks=64))
    finally:
        torch.set_default_device(None)
    with torch.device("meta"):
        _check_that_llm_works(before)
        _check_that_llm_works(LLM(DEMO_MODEL, threads=1, num_blocks=64))
    assert torch.get_default_device().type == "cpu"


def test_the_gpu_of_the_engine_is_the_current_one_for_as_long_as_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches kernels on the current GPU, on which their tensors need not be."""
    chosen: list[torch.device] = []

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        chosen.append(device)
        yield
        chosen.pop()

    monkeypatch.setattr(torch.cuda, "device", current)
    with devices_set_for(torch.device("cuda", 0)):
        assert chosen == [torch.device("cuda", 0)]
    with devices_set_for(torch.device("cpu")):
        assert not chosen


def test_the_engine_is_built_and_steps_with_the_devices_set(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[torch.device] = []

    @contextmanager
    def noted(device: torch.device) -> Iterator[None]:
        inside.append(device)
        with devices_set_for(device):
            yield
        inside.pop()

    seen: list[list[torch.device]] = []
    step = Engine.step

    def stepped(engine: Engine, *arguments: Any) -> Any:
        seen.append([*inside])
        return step(engine, *arguments)

    def prepared(*arguments: Any) -> Any:
        seen.append([*inside])
        return prepare_engine(*arguments)

    monkeypatch.setattr("kvrelay.offline.llm.devices_set_for", noted)
    monkeypatch.setattr("kvrelay.offline.llm.prepare_engine", prepared)
    monkeypatch.setattr(Engine, "step", stepped)
    LLM(DEMO_MODEL, threads=1, num_blocks=64).generate("The capital of France is", GREEDY, progress=False)
    assert len(seen) > 4 and all(found == [torch.device("cpu")] for found in seen)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_default_dtype_is_not_used(dtype: torch.dtype) -> None:
    """Neither for the scales of FP8 KV nor for a dynamic rotary embedding."""
    rope = RopeParameters(RopeKind.DYNAMIC, 10_000.0, 64, factor=3.0)
    options: dict[str, Any] = {"threads": 1, "num_blocks": 64, "kv_cache_dtype": "fp8"}
    frequencies = inverse_frequencies(rope, head_dim=16, max_positions=200)
    expected = LLM(DEMO_MODEL, **options).generate("The capital of France is", GREEDY, progress=False)
    torch.set_default_dtype(dtype)
    try:
        assert torch.equal(inverse_frequencies(rope, head_dim=16, max_positions=200), frequencies)
        found = LLM(DEMO_MODEL, **options).generate("The capital of France is", GREEDY, progress=False)
        assert found[0].outputs[0].token_ids == expected[0].outputs[0].token_ids
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"attention_backend": "reference"}])
def test_autocast_is_not_used(options: dict[str, Any]) -> None:
    """It would mix dtypes, or round elsewhere, and blocks that are computed so would be found under the same names."""
    sampling = SamplingParams(temperature=0.0, max_tokens=8, logprobs=2, prompt_logprobs=1)
    prompts: list[str | list[int]] = ["The capital of France is", [5, 6, 7] * 20]

    def outputs(llm: LLM) -> list[object]:
        results = llm.generate(prompts, sampling, progress=False)
        return [(result.prompt_logprobs, result.outputs) for result in results]

    before = LLM(DEMO_MODEL, threads=1, num_blocks=64, **options)
    expected = outputs(before)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert outputs(before) == expected
        assert outputs(LLM(DEMO_MODEL, threads=1, num_blocks=64, **options)) == expected
        assert torch.is_autocast_enabled("cpu")
    assert outputs(before) == expected
