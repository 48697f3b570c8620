"""Counter-based randomness: the published vectors, independence of the batch, and the shape of the noise."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from kvrelay.engine.sampling.random_bits import Draw, Stream, gumbel, philox4x32, uniform

# Known answers for philox4x32 with 10 rounds, as published with the authors' Random123 library: counter, key, output.
KNOWN_ANSWERS = [
    (
        (0x00000000, 0x00000000, 0x00000000, 0x00000000),
        (0x00000000, 0x00000000),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, ...]:
    return tuple(philox4x32(np.array(counter, dtype=np.uint64), np.array(key, dtype=np.uint64)).tolist())


def starts(*first: int) -> Tensor:
    return torch.tensor(first, dtype=torch.int64)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    assert philox(counter, key) == expected


def test_philox_known_answers_all_at_once() -> None:
    counters = np.array([counter for counter, _, _ in KNOWN_ANSWERS], dtype=np.uint64).T
    keys = np.array([key for _, key, _ in KNOWN_ANSWERS], dtype=np.uint64).T
    assert philox4x32(counters, keys).T.tolist() == [list(expected) for _, _, expected in KNOWN_ANSWERS]


def test_uniform_numbers_are_philox_words_of_the_documented_counter() -> None:
    draw = Draw(seed=0x0123456789ABCDEF, choice_index=3, position=70_000)
    numbers = uniform([draw], Stream.TOKEN_GROUP, starts(128), 10)
    assert numbers.shape == (1, 10)
    for offset in range(10):
        index = 128 + offset
        words = philox((index // 4, 70_000, 3, int(Stream.TOKEN_GROUP)), (0x89ABCDEF, 0x01234567))
        assert numbers[0, offset].item() == (words[index % 4] + 0.5) / 2**32


def test_every_part_of_the_counter_matters() -> None:
    draws = [Draw(1, 0, 0), Draw(2, 0, 0), Draw(1 + 2**32, 0, 0), Draw(1, 1, 0), Draw(1, 0, 1), Draw(2**64 - 1, 127, 9)]
    rows = [uniform([draw], stream, starts(0), 64) for draw in draws for stream in Stream]
    assert len(set(torch.cat(rows).flatten().tolist())) == 64 * len(rows)


def test_a_draw_does_not_depend_on_the_batch() -> None:
    draws = [Draw(seed * 0x9E3779B97F4A7C15 % 2**64, seed % 3, 17 * seed) for seed in range(20)]
    first = torch.arange(20) * 128
    together = gumbel(uniform(draws, Stream.TOKEN, first, 128))
    for index, draw in enumerate(draws):
        alone = gumbel(uniform([draw], Stream.TOKEN, first[index : index + 1], 128))
        assert torch.equal(alone[0], together[index])
    assert torch.equal(uniform(draws, Stream.TOKEN, first, 7), uniform(draws, Stream.TOKEN, first, 128)[:, :7])


def test_uniform_numbers_fill_the_open_interval_evenly() -> None:
    numbers = uniform([Draw(11, 0, position) for position in range(64)], Stream.TOKEN, torch.zeros(64).long(), 4096)
    assert numbers.dtype == torch.float64
    assert 0.0 < numbers.min() < 1e-4 < 1 - 1e-4 < numbers.max() < 1.0
    counts = torch.histc(numbers.float(), bins=256, min=0.0, max=1.0)
    expected = numbers.numel() / 256
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_square - 255) < 5 * math.sqrt(2 * 255)


def test_gumbel_noise_is_bounded_and_has_its_moments() -> None:
    extremes = gumbel(torch.tensor([0.5 * 2.0**-32, 1 - 0.5 * 2.0**-32], dtype=torch.float64))
    assert 22.8 < float(extremes[0]) < 22.9
    assert -3.2 < float(extremes[1]) < -3.1
    draws = [Draw(5, 0, position) for position in range(64)]
    noise = gumbel(uniform(draws, Stream.TOKEN, torch.zeros(64).long(), 4096))
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.01)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.03)
