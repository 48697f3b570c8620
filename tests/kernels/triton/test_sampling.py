"""Sampling on the device gives the tokens of the host's sampler, and the very bits of its random numbers."""

import random
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from paged_kernels.gpu.device.sampling import gumbel_noise
from torch import Tensor

from kvrelay.core.generation.sampling_params import MAX_SEED, SamplingParams
from kvrelay.engine.gpu.packed_arrays import PackedArrays
from kvrelay.engine.gpu.sampler import GpuSampler
from kvrelay.engine.sampling.fixed_edits import fixed_edits
from kvrelay.engine.sampling.logprobs import token_logprobs_in_torch
from kvrelay.engine.sampling.random_bits import Draw, Stream, gumbel, uniform
from kvrelay.engine.sampling.sampler import NO_TOKEN, SampledToken, Sampler, SamplingRow
from tests.engine.sampling.seen_after import seen_after

VOCAB_SIZE = 1000
EOS = (7, 900)


def make_row(index: int, **fields: Any) -> SamplingRow:
    params = SamplingParams(**{"seed": 1000 + index, **fields})
    chooser = random.Random(index)
    prompt = [chooser.randrange(VOCAB_SIZE) for _ in range(200)]
    output = [chooser.randrange(40) for _ in range(30)]
    seen = seen_after(params, prompt, output)
    return SamplingRow(params, index % 3, 230 + index, len(output), seen, fixed_edits(params))


def make_logits(num_rows: int, vocab_size: int = VOCAB_SIZE) -> Tensor:
    return torch.randn(num_rows, vocab_size) * 3


def check(logits: Tensor, rows: list[SamplingRow]) -> None:
    """Compares tokens with those of the host's sampler, and log-probabilities with those of torch, which both devices
    have: the host's own are of compiled kernels."""
    expected = []
    for row_logits, row, sampled in zip(logits, rows, Sampler(EOS).sample(logits, rows), strict=True):
        k = row.params.logprobs
        wanted = k is not None and sampled.token_id != NO_TOKEN
        [entry] = token_logprobs_in_torch([row_logits], [sampled.token_id], k or 0) if wanted else [None]
        expected.append(SampledToken(sampled.token_id, entry))
    assert sample(logits, rows) == expected


def sample(logits: Tensor, rows: list[SamplingRow]) -> list[SampledToken]:
    sampler = GpuSampler(EOS)
    packed = PackedArrays(sampler.arrays(rows))
    memory = torch.empty(packed.num_bytes, dtype=torch.uint8)
    packed.to(memory)
    token_ids = torch.empty(len(rows), dtype=torch.int64)
    return sampler.launch(logits, rows, packed.views(memory), token_ids).collect()


@triton.jit  # type: ignore[untyped-decorator]
def noise_kernel(output, seed, position, choice, STREAM: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.arange(0, 1024)
    tl.store(output + index, gumbel_noise(seed, position, choice, index, STREAM))


@pytest.mark.parametrize("stream", list(Stream))
@pytest.mark.parametrize(("seed", "position", "choice"), [(0, 0, 0), (12345, 77, 3), (2**62 + 99, 2**31 - 1, 127)])
def test_noise_has_the_bits_of_the_host(seed: int, position: int, choice: int, stream: Stream) -> None:
    actual = torch.empty(1024, dtype=torch.float64)
    noise_kernel[(1,)](actual, seed, position, choice, STREAM=int(stream))
    numbers = uniform([Draw(seed, choice, position)], stream, torch.zeros(1, dtype=torch.int64), 1024)[0]
    torch.testing.assert_close(actual, gumbel(numbers), rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"temperature": 1e-9},
        {"temperature": 100.0},
        {"seed": MAX_SEED},
        {"top_k": 1},
        {"top_k": 40},
        {"top_k": VOCAB_SIZE},
        {"top_p": 1e-6},
        {"top_p": 0.9},
        {"top_p": 0.9999},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"top_k": 50, "top_p": 0.8, "min_p": 0.02, "temperature": 1.3},
    ],
    ids=str,
)
def test_same_tokens(fields: dict[str, Any]) -> None:
    check(make_logits(2), [make_row(index, **fields) for index in range(2)])


def test_all_but_no_temperature_takes_the_lowest_id_among_equals() -> None:
    logits = make_logits(8)
    logits[:, [77, 200]] = logits.max() + 1.0
    check(logits, [make_row(index, temperature=9e-6) for index in range(8)])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": ((3, 20.0), (999, -5.5), (0, 20.0))},
        {"min_tokens": 31, "max_tokens": 40, "logit_bias": ((7, 100.0),)},
        {"min_tokens": 31, "max_tokens": 40, "ignore_eos": True, "stop_token_ids": (12,), "logit_bias": ((12, 90.0),)},
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 1e-300},
        {"presence_penalty": 1.5, "frequency_penalty": -0.5},
        {"repetition_penalty": 1.1, "presence_penalty": 2.0, "logit_bias": ((5, 8.0),), "top_p": 0.9},
    ],
    ids=str,
)
def test_same_tokens_after_penalties(fields: dict[str, Any], temperature: float) -> None:
    check(make_logits(2), [make_row(index, temperature=temperature, **fields) for index in range(2)])


def test_a_mixed_batch_with_logprobs() -> None:
    rows = [make_row(0), make_row(1, temperature=0.0, logprobs=3), make_row(2, top_k=5), make_row(3, min_p=0.1)]
    check(make_logits(4), rows)


@pytest.mark.parametrize("vocab_size", [1, 127, 128, 129, 257, 5000])
def test_any_vocabulary(vocab_size: int) -> None:
    rows = [SamplingRow(SamplingParams(seed=s, top_p=p, top_k=k), 0, s, 0) for s, p, k in [(1, 1.0, 0), (2, 0.9, 60)]]
    check(make_logits(2, vocab_size), rows)


@pytest.mark.parametrize(
    "fields", [{"top_k": 3}, {"top_p": 0.3}, {"top_k": 10, "top_p": 0.5}, {"temperature": 0.0}], ids=str
)
def test_ties_are_decided_for_the_lowest_ids(fields: dict[str, Any]) -> None:
    logits = torch.zeros(2, VOCAB_SIZE) - 5
    logits[:, 300:310] = 1.0
    logits[:, 700:705] = 1.0
    logits[:, 650] = 1.5
    check(logits, [make_row(index, **fields) for index in range(2)])


@pytest.mark.parametrize("spread", [0.0, 1e-3, 0.3, 30.0])
@pytest.mark.parametrize("fields", [{"top_k": 70}, {"top_k": 4000}, {"top_p": 0.6}, {"top_k": 3000, "top_p": 0.9}])
def test_flat_and_peaked_rows(spread: float, fields: dict[str, Any]) -> None:
    """The vocabulary has several tiles, and after each pass more or fewer tokens are in question."""
    logits = torch.randn(2, 5000) * spread
    logits[1] = logits[1].bfloat16().float()  # many ties
    check(logits, [SamplingRow(SamplingParams(seed=seed, **fields), 0, seed, 0) for seed in (1, 2)])


def test_a_ban_of_everything_is_no_ban() -> None:
    everything = tuple(range(VOCAB_SIZE))
    check(make_logits(2), [make_row(i, min_tokens=40, max_tokens=50, stop_token_ids=everything) for i in range(2)])


def test_tokens_that_the_model_excludes() -> None:
    logits = make_logits(3)
    logits[:, 100:] = -torch.inf
    check(logits, [make_row(0), make_row(1, top_p=0.95), make_row(2, repetition_penalty=2.0)])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_has_no_token_and_others_have_theirs(value: float) -> None:
    logits, rows = make_logits(3), [make_row(index) for index in range(3)]
    expected = [token.token_id for token in sample(logits, rows)]
    expected[1] = NO_TOKEN
    logits[1, 500] = value
    assert [token.token_id for token in sample(logits, rows)] == expected


def test_many_draws_of_many_kinds() -> None:
    chooser = random.Random(5)
    rows = [
        make_row(
            index,
            temperature=chooser.choice([0.0, 0.5, 1.0, 2.0]),
            top_k=chooser.choice([0, 0, 7, 200]),
            top_p=chooser.choice([1.0, 0.5, 0.95]),
            min_p=chooser.choice([0.0, 0.01]),
            repetition_penalty=chooser.choice([1.0, 1.2]),
            frequency_penalty=chooser.choice([0.0, 0.3]),
            seed=chooser.randrange(MAX_SEED),
        )
        for index in range(12)
    ]
    check(make_logits(12), rows)
