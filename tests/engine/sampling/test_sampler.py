"""The sampler, compared with a reference in plain Python numbers and with the exact distribution."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvrelay.core.generation.outputs import TokenLogprobs
from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.engine.sampling.fixed_edits import fixed_edits
from kvrelay.engine.sampling.logprobs import token_logprobs
from kvrelay.engine.sampling.sampler import NO_TOKEN, SampledToken, Sampler, SamplingRow
from tests.engine.sampling.reference import EOS, VOCAB_SIZE, adjusted, make_logits, probabilities_of
from tests.engine.sampling.seen_after import seen_after


def make_row(
    params: SamplingParams,
    *,
    position: int = 0,
    choice_index: int = 0,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
) -> SamplingRow:
    seen = seen_after(params, prompt, output)
    return SamplingRow(params, choice_index, position, len(output), seen, fixed_edits(params))


def sample_one(logits: Tensor, params: SamplingParams, *, output: Sequence[int] = ()) -> SampledToken:
    return Sampler([EOS]).sample(logits.unsqueeze(0), [make_row(params, output=output)])[0]


def check_distribution(logits: Tensor, params: SamplingParams, *, output: Sequence[int] = (), num_draws: int) -> None:
    """Compares draws at `num_draws` positions of one seed with the reference, by Pearson's chi-square test with rare
    tokens pooled."""
    rows = [make_row(params, position=position, output=output) for position in range(num_draws)]
    sampled = Sampler([EOS]).sample(logits.repeat(num_draws, 1), rows)
    counts = [0] * logits.numel()
    for token in sampled:
        counts[token.token_id] += 1
    probabilities = probabilities_of(adjusted(logits, rows[0]), params)
    assert all(probability > 0 for probability, count in zip(probabilities, counts, strict=True) if count > 0)
    cells: list[tuple[float, int]] = []
    pooled_probability, pooled_count = 0.0, 0
    for probability, count in zip(probabilities, counts, strict=True):
        if probability * num_draws >= 10:
            cells.append((probability, count))
        else:
            pooled_probability += probability
            pooled_count += count
    if pooled_probability * num_draws >= 10:
        cells.append((pooled_probability, pooled_count))
    chi_square = math.fsum((count - p * num_draws) ** 2 / (p * num_draws) for p, count in cells)
    degrees = len(cells) - 1
    assert chi_square < degrees + 4 * math.sqrt(2 * degrees) + 4


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=1),
        SamplingParams(seed=2**64 - 1, temperature=0.6),
        SamplingParams(seed=3, temperature=1.7),
        SamplingParams(seed=4, top_k=20),
        SamplingParams(seed=5, top_p=0.7),
        SamplingParams(seed=6, min_p=0.1),
        SamplingParams(seed=7, temperature=1.3, top_k=100, top_p=0.9, min_p=0.02),
        SamplingParams(
            seed=8,
            temperature=1.2,
            repetition_penalty=1.3,
            presence_penalty=0.4,
            frequency_penalty=0.3,
            logit_bias=((5, 6.0), (6, -3.0)),
            min_tokens=9,
        ),
    ],
    ids=["plain", "cold", "hot", "top_k", "top_p", "min_p", "all_limits", "penalties"],
)
def test_distribution_is_exact(params: SamplingParams) -> None:
    check_distribution(make_logits(10)[0], params, output=(5, 5, 17, 90), num_draws=6000)


def test_distribution_of_a_peaked_and_of_a_flat_row() -> None:
    peaked = torch.full((1000,), -4.0)
    peaked[777] = 3.0
    check_distribution(peaked, SamplingParams(seed=1), num_draws=4000)
    check_distribution(torch.zeros(130), SamplingParams(seed=2), num_draws=8000)


def test_choices_and_neighbouring_seeds_are_independent() -> None:
    logits = torch.zeros(8)
    sampler = Sampler([])
    num_draws = 4000
    draws = []
    for seed, choice_index in ((1, 0), (1, 1), (2, 0)):
        params = SamplingParams(seed=seed)
        rows = [make_row(params, position=i, choice_index=choice_index) for i in range(num_draws)]
        draws.append([token.token_id for token in sampler.sample(logits.expand(num_draws, -1), rows)])
    for first, second in ((0, 1), (0, 2), (1, 2)):
        equal = sum(a == b for a, b in zip(draws[first], draws[second], strict=True))
        assert abs(equal - num_draws / 8) < 5 * math.sqrt(num_draws * 7 / 64)


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        seed=rng.getrandbits(64),
        temperature=rng.choice((0.0, 0.3, 1.0, 1.0, 2.5)),
        top_k=rng.choice((0, 0, 1, 5, 40, VOCAB_SIZE, 10**6)),
        top_p=rng.choice((1.0, 1.0, 0.99, 0.9, 0.5, 1e-6)),
        min_p=rng.choice((0.0, 0.0, 0.01, 0.3, 1.0)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.5, 0.7)),
        presence_penalty=rng.choice((0.0, 0.0, 1.5, -1.0)),
        frequency_penalty=rng.choice((0.0, 0.0, 0.5, -0.25)),
        logit_bias=tuple((rng.randrange(VOCAB_SIZE), rng.uniform(-5, 5)) for _ in range(rng.choice((0, 0, 3)))),
        min_tokens=rng.choice((0, 0, 4, 50)),
        max_tokens=64,
        stop_token_ids=tuple(rng.sample(range(VOCAB_SIZE), rng.choice((0, 2)))),
        ignore_eos=rng.random() < 0.3,
        logprobs=rng.choice((None, None, 0, 3)),
    )


def random_rows(seed: int, count: int) -> list[SamplingRow]:
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 30))]
        output = [rng.randrange(20) for _ in range(rng.randrange(10))]
        position = len(prompt) + len(output)
        rows.append(
            make_row(random_params(rng), position=position, choice_index=rng.randrange(4), prompt=prompt, output=output)
        )
    return rows


@pytest.mark.parametrize("seed", range(10))
def test_a_row_gives_the_same_token_alone_and_in_any_batch(seed: int) -> None:
    rows = random_rows(seed, 24)
    logits = make_logits(seed, len(rows), ties=seed % 2 == 0)
    sampler = Sampler([EOS])
    together = sampler.sample(logits, rows)
    alone = [sampler.sample(logits[i : i + 1].clone(), [row])[0] for i, row in enumerate(rows)]
    assert together == alone
    order = random.Random(seed).sample(range(len(rows)), len(rows))
    shuffled = sampler.sample(logits[order], [rows[i] for i in order])
    assert shuffled == [together[i] for i in order]


@pytest.mark.parametrize("seed", range(10))
def test_sampled_tokens_are_allowed_and_greedy_ones_are_the_reference(seed: int) -> None:
    rows = random_rows(100 + seed, 40)
    logits = make_logits(seed, len(rows), ties=seed % 2 == 0)
    before = logits.clone()
    for row, row_logits, token in zip(rows, logits, Sampler([EOS]).sample(logits, rows), strict=True):
        values = adjusted(row_logits, row)
        if row.params.greedy:
            assert values[token.token_id] == pytest.approx(max(values), abs=1e-5)
        else:
            assert probabilities_of(values, row.params)[token.token_id] > 0
    assert torch.equal(logits, before)


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.zeros(3, VOCAB_SIZE)
    logits[1, [40, 41]] = 2.0
    logits[2, 299] = 1.0
    greedy = SamplingParams(temperature=0.0)
    sampled = Sampler([EOS]).sample(logits, [make_row(greedy)] * 3)
    assert sampled == [SampledToken(0, None), SampledToken(40, None), SampledToken(299, None)]
    for seed in range(20):  # a temperature that is all but 0 is meant to be 0
        cold = SamplingParams(temperature=9e-6, top_p=0.5, min_p=0.5, seed=seed)
        assert sample_one(logits[1], cold).token_id == 40
    biased = SamplingParams(temperature=0.0, logit_bias=((77, 2.0), (40, -0.5), (41, -0.5)))
    assert [token.token_id for token in Sampler([EOS]).sample(logits, [make_row(biased)] * 3)] == [77] * 3


def test_the_coldest_temperature_is_greedy_and_the_hottest_is_uniform() -> None:
    logits = make_logits(3)[0]
    for temperature in (5e-324, 1e-30, 1e-5):
        for top_p in (0.9, 1.0):
            params = SamplingParams(seed=1, temperature=temperature, top_p=top_p)
            assert sample_one(logits, params).token_id == int(logits.argmax())
    check_distribution(make_logits(3, vocab_size=50)[0], SamplingParams(seed=1, temperature=100.0), num_draws=3000)


def test_min_tokens_bans_what_would_end_the_output() -> None:
    logits = torch.zeros(10)
    logits[EOS], logits[7], logits[4] = 9.0, 8.0, 7.0
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(7,))
    assert [sample_one(logits, params, output=[1] * n).token_id for n in range(4)] == [4, 4, EOS, EOS]
    ignoring = replace(params, ignore_eos=True, logit_bias={7: 2.0})  # with it, 7 is the most likely
    assert [sample_one(logits, ignoring, output=[1] * n).token_id for n in range(4)] == [EOS, EOS, 7, 7]
    forced = SamplingParams(seed=1, min_tokens=2, logit_bias=((EOS, 100.0),))
    assert sample_one(logits, forced).token_id != EOS
    everything = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=tuple(range(10)))
    assert sample_one(logits, everything).token_id == EOS
    excluded = torch.full((10,), -math.inf)  # by the model
    excluded[EOS] = 5.0
    assert sample_one(excluded, replace(params, stop_token_ids=())).token_id == EOS
    excluded[9] = 1.0
    assert sample_one(excluded, replace(params, stop_token_ids=())).token_id == 9


@pytest.mark.parametrize("penalty", [5e-324, 1e-30, 1e30, 1.7e308])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_penalty_is_too_extreme(penalty: float, temperature: float) -> None:
    params = SamplingParams(seed=1, temperature=temperature, repetition_penalty=penalty, min_tokens=999)
    for shift in (0.0, -50.0, 50.0):
        logits = make_logits(4)[0] + shift
        logits[0] = 0.0
        for seen in (range(VOCAB_SIZE), range(1, VOCAB_SIZE)):
            token_id = sample_one(logits, params, output=list(seen)).token_id
            assert 0 <= token_id < VOCAB_SIZE
            assert token_id != EOS
    assert sample_one(make_logits(4)[0] - 50.0, params, output=list(range(VOCAB_SIZE))).token_id != EOS


def test_tokens_that_a_penalty_makes_as_likely_as_can_be_share_the_draws() -> None:
    params = SamplingParams(seed=1, repetition_penalty=5e-324)
    rows = [make_row(params, output=[4, 7], position=position) for position in range(40)]
    tokens = Sampler([EOS]).sample(torch.ones(len(rows), VOCAB_SIZE), rows)
    assert {token.token_id for token in tokens} == {4, 7}


def test_logprobs_are_those_of_the_unmodified_logits() -> None:
    logits = make_logits(5)[0]
    exact = logits.to(torch.float64).log_softmax(-1)
    best = int(logits.argmax())
    params = SamplingParams(temperature=0.0, logprobs=4, logit_bias=((best, -100.0),), top_k=1)
    entry = sample_one(logits, params).logprobs
    assert entry is not None
    order = exact.argsort(descending=True).tolist()
    assert (entry.token_id, entry.rank) == (order[1], 2)
    assert entry.logprob == pytest.approx(float(exact[order[1]]), abs=1e-5)
    assert [token_id for token_id, _ in entry.top] == order[:4]
    assert [logprob for _, logprob in entry.top] == pytest.approx([float(exact[i]) for i in order[:4]], abs=1e-5)
    none = sample_one(logits, SamplingParams(temperature=0.0, logprobs=0)).logprobs
    assert none is not None
    assert (none.token_id, none.rank, none.top) == (best, 1, ())


def test_prompt_logprobs_are_those_of_a_log_softmax() -> None:
    logits = make_logits(6, 5, ties=True)
    targets = [0, 1, 2, 150, 299]
    exact = logits.to(torch.float64).log_softmax(-1)
    entries = token_logprobs(list(logits), targets, 3)
    for row, target, entry in zip(exact, targets, entries, strict=True):
        values = row.tolist()
        assert entry.token_id == target
        assert entry.logprob == pytest.approx(values[target], abs=1e-5)
        assert entry.rank == 1 + sum(value > values[target] for value in values)
        expected = sorted(((-value, token_id) for token_id, value in enumerate(values)))[:3]
        assert [token_id for token_id, _ in entry.top] == [token_id for _, token_id in expected]
    one_by_one = [list(token_logprobs([logits[i]], targets[i : i + 1], 3)) for i in range(5)]
    assert [entry for (entry,) in one_by_one] == list(entries)
    assert list(token_logprobs([], [], 3)) == []


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(seed=1, top_p=0.5)])
def test_a_row_of_logits_that_are_not_finite_gets_no_token_and_others_get_theirs(
    params: SamplingParams, value: float
) -> None:
    logits, sampler = make_logits(8, 3), Sampler([EOS])
    rows = [make_row(replace(params, logprobs=2))] * 3
    expected = sampler.sample(logits, rows)
    expected[1] = SampledToken(NO_TOKEN, None)
    logits[1, 250] = value
    assert sampler.sample(logits, rows) == expected
    logits[1] = -math.inf
    assert sampler.sample(logits, rows) == expected


def test_tokens_the_model_itself_excludes_are_never_sampled() -> None:
    logits = torch.full((VOCAB_SIZE,), -math.inf)
    logits[[3, 200]] = 0.0
    rows = [make_row(SamplingParams(seed=1, temperature=9.0, top_p=0.999), position=i) for i in range(200)]
    sampled = Sampler([EOS]).sample(logits.expand(200, -1), rows)
    assert {token.token_id for token in sampled} == {3, 200}


def test_an_empty_batch_has_no_tokens() -> None:
    assert Sampler([EOS]).sample(torch.empty(0, VOCAB_SIZE), []) == []


def test_a_vocabulary_of_one_token_gives_that_token() -> None:
    params = SamplingParams(seed=1, top_k=1, top_p=0.1, min_p=1.0, logprobs=1)
    assert sample_one(torch.tensor([1.5]), params) == SampledToken(0, TokenLogprobs(0, 0.0, 1, ((0, 0.0),)))


def test_the_tokens_of_a_seed_never_change() -> None:
    """The tokens were computed with Python's own integers and floats. Other tokens would break streams that move
    between versions."""
    logits = (torch.arange(1000) * 7919 % 101).to(torch.float32) / 50.0
    rows = [make_row(SamplingParams(seed=1234567890123), position=i, choice_index=i % 2) for i in range(8)]
    sampled = Sampler([]).sample(logits.expand(8, -1), rows)
    assert [token.token_id for token in sampled] == [904, 888, 863, 706, 729, 133, 591, 721]
