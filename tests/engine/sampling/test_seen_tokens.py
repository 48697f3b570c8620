"""What penalties read is what counting all tokens anew would give, and they change the same bits of the logits."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from paged_kernels.gpu.sampling import EDIT_BANNED, EDIT_SEEN
from torch import Tensor

from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.engine.gpu.sampler import GpuSampler
from kvrelay.engine.sampling.fixed_edits import fixed_edits
from kvrelay.engine.sampling.penalties import adjust
from kvrelay.engine.sampling.sampler import SamplingRow
from kvrelay.engine.sampling.seen_tokens import SeenTokens
from tests.engine.sampling.seen_after import seen_after

VOCAB_SIZE = 500
EOS = (2, 7)
LARGEST = torch.finfo(torch.float32).max
PENALTIES = (
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.7},
    {"frequency_penalty": -0.3},
    {"repetition_penalty": 0.8, "presence_penalty": -1.1, "frequency_penalty": 0.4},
)


def tokens_of(rng: random.Random, most: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(most))]


def assert_counted(seen: SeenTokens, prompt: Sequence[int], output: Sequence[int]) -> None:
    counts = Counter(output)
    assert seen.token_ids.tolist() == list(dict.fromkeys((*prompt, *output)))
    assert seen.output_counts.tolist() == [counts[token_id] for token_id in seen.token_ids.tolist()]
    assert seen.num_output_tokens == len(output)


@pytest.mark.parametrize("seed", range(20))
def test_tokens_are_counted_as_they_come(seed: int) -> None:
    rng = random.Random(seed)
    prompt = tokens_of(rng, 300)
    branches: list[tuple[SeenTokens, list[int]]] = [(SeenTokens(prompt), [])]
    for _ in range(60):
        seen, output = rng.choice(branches)
        if rng.random() < 0.1:
            branches.append((seen.copy(), output.copy()))
        new = tokens_of(rng, 20)
        seen.add(new)
        output += new
        for seen, output in branches:
            assert_counted(seen, prompt, output)


def drawn(seed: int, penalties: dict[str, Any]) -> tuple[SamplingParams, list[int], list[int]]:
    """Returns parameters, a prompt and an output whose tokens overlap with the biased and the banned ones."""
    rng = random.Random(seed)
    prompt, output = tokens_of(rng, 900), tokens_of(rng, 200)
    biased = {token_id: rng.uniform(-5, 5) for token_id in (*prompt[:2], *output[:2], *tokens_of(rng, 4), 2)}
    params = SamplingParams(
        seed=1,
        max_tokens=400,
        min_tokens=rng.choice([0, 300]),
        stop_token_ids=tuple(output[:2]),
        logit_bias=biased,
        **penalties,
    )
    return params, prompt, output


def plainly_penalised(logits: Tensor, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
    """Applies penalties by their definitions, to all tokens of a prompt and an output."""
    logits = logits.clone()
    if params.repetition_penalty != 1.0:
        ids = torch.tensor([*prompt, *output], dtype=torch.int64)
        values = logits[ids].to(torch.float64)
        penalty = params.repetition_penalty
        penalised = torch.where(values > 0, values / penalty, values * penalty).clamp(-LARGEST, LARGEST)
        logits[ids] = torch.where(values.isinf(), values, penalised).to(torch.float32)
    for token_id, count in Counter(output).items():
        amount = params.presence_penalty + params.frequency_penalty * count
        logits[token_id] -= torch.tensor(amount, dtype=torch.float32)
    return logits


@pytest.mark.parametrize("penalties", PENALTIES, ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_logits_have_the_bits_of_the_plain_formula(seed: int, penalties: dict[str, Any]) -> None:
    params, prompt, output = drawn(seed, penalties)
    logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3
    unpenalised = replace(params, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
    num, fixed = len(output), fixed_edits(params)
    before, found = logits.clone(), logits.clone()
    adjust(before.numpy(), unpenalised, eos_token_ids=EOS, num_output_tokens=num, seen=None, fixed=fixed)
    seen = seen_after(params, prompt, output)
    restore = adjust(found.numpy(), params, eos_token_ids=EOS, num_output_tokens=num, seen=seen, fixed=fixed)
    assert torch.equal(found, plainly_penalised(before, params, prompt, output))
    restore()
    assert torch.equal(found, logits)


@pytest.mark.parametrize("penalties", ({}, *PENALTIES), ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_a_gpu_gets_each_changed_token_once(seed: int, penalties: dict[str, Any]) -> None:
    params, prompt, output = drawn(seed, penalties)
    row = SamplingRow(params, 0, 0, len(output), seen_after(params, prompt, output), fixed_edits(params))
    plain = SamplingRow(SamplingParams(seed=1), 0, 0, 0)
    arrays = GpuSampler(EOS).arrays([plain, row, plain, row])
    starts, tokens, biases, amounts, flags = (
        arrays[f"sampling.edit_{name}"] for name in ("starts", "tokens", "biases", "amounts", "flags")
    )
    expected = plain_edits(params, prompt, output)
    assert starts.tolist() == [0, 0, len(expected), len(expected), 2 * len(expected)]
    for begin, end in ((starts[1], starts[2]), (starts[3], starts[4])):
        values = (array[begin:end].tolist() for array in (tokens, biases, amounts, flags))
        assert sorted(zip(*values, strict=True)) == expected


def plain_edits(
    params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> list[tuple[int, float, float, int]]:
    """Returns token, bias, amount to subtract and flags of each token that changes, by token."""
    counts = Counter(output)
    repeated = {*prompt, *output} if params.repetition_penalty != 1.0 else set()
    penalised = set(output) if params.presence_penalty or params.frequency_penalty else set()
    banned = {*params.stop_token_ids, *EOS} if len(output) < params.min_tokens else set()
    bias = dict(params.biases)
    return [
        (
            token_id,
            float(np.float32(bias.get(token_id, 0.0))),
            float(np.float32(params.presence_penalty + params.frequency_penalty * counts[token_id]))
            if token_id in penalised
            else 0.0,
            (EDIT_BANNED if token_id in banned else 0) + (EDIT_SEEN if token_id in repeated else 0),
        )
        for token_id in sorted({*bias, *repeated, *penalised, *banned})
    ]
