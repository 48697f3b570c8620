"""A sequence's KV and logits in bfloat16 are the same to the bit, however its tokens were divided among steps, and on
most processors: what a node computes again after a loss is what another one had."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from paged_kernels import _native
from torch import Tensor

from tests.engine import load_on_cpu
from tests.engine.paged_run import PagedRun
from tests.engine.tiny_models import make_tiny_model

NUM_TOKENS = 1100  # decodes of more than 1,024 join several chunks of KV


def has_our_products_alone(name: str) -> bool:
    """Tells whether neither a matrix unit, which rounds steps of few rows otherwise, nor torch multiplies."""
    return "amx" not in name and name != "portable"


def _tokens(count: int) -> list[int]:
    tokens: list[int] = torch.randint(0, 320, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    return tokens


@pytest.fixture(params=[name for name in _native.available_instruction_sets() if has_our_products_alone(name)])
def instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    before = _native.instruction_set()
    _native.set_instruction_set(request.param)
    yield
    _native.set_instruction_set(before)


@pytest.mark.usefixtures("instruction_set")
def test_steps_do_not_change_a_bit(tmp_path: Path) -> None:
    """Holds where at least four query heads share a KV head."""
    model = load_on_cpu.load(make_tiny_model("llama-mqa", tmp_path), "none", dtype="bfloat16").model
    assert model.stack is not None
    tokens = _tokens(NUM_TOKENS)

    def computed(steps: list[int]) -> tuple[Tensor, Tensor]:
        assert sum(steps) == NUM_TOKENS
        run = PagedRun(model, num_sequences=1, max_tokens=NUM_TOKENS)
        logits, begin = [], 0
        for count in steps:
            logits += run.step([tokens[begin : begin + count]])
            begin += count
        return torch.cat(logits), run.pool.nan_to_num()

    whole = computed([512, 512, 76])
    for steps in ([NUM_TOKENS], [1000, *[1] * 100], [1, 2, 600, 430, *[1] * 67]):
        assert all(map(torch.equal, whole, computed(steps))), steps


def test_processors_without_products_of_bfloat16_pairs_do_not_differ_in_a_bit(tmp_path: Path) -> None:
    make_tiny_model("llama-mqa", tmp_path)
    before, logits = _native.instruction_set(), []
    try:
        for name in _native.available_instruction_sets():
            if has_our_products_alone(name) and "bf16" not in name:
                _native.set_instruction_set(name)
                model = load_on_cpu.load(tmp_path, "none", dtype="bfloat16").model
                logits += PagedRun(model, num_sequences=1, max_tokens=200).step([_tokens(200)])
    finally:
        _native.set_instruction_set(before)
    assert all(torch.equal(each, logits[0]) for each in logits)
