"""A program that has chosen where torch makes its tensors: `LLM` works as in any other, and the choice stays."""

import torch

from kvrelay import LLM, SamplingParams
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
