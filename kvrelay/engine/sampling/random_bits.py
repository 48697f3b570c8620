"""Randomness without state: every number is a pure function of (seed, choice index, position, stream, index).

Philox4x32 with 10 rounds, a counter-based generator: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as
1, 2, 3" (SC'11). The key is the seed; the counter is (index // 4, position, choice index, stream), and the four words
of one output serve four consecutive indices. Invariant: a number does not depend on the batch, on its order, or on what
was drawn before; the bits are the same on every machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ROUNDS = 10
_MULTIPLIERS = np.array((0xD2511F53, 0xCD9E8D57), dtype=np.uint64)
# What each round adds to the key.
_WEYL = np.arange(_ROUNDS, dtype=np.uint64)[:, np.newaxis] * np.array((0x9E3779B9, 0xBB67AE85), dtype=np.uint64)
_MASK = np.uint64(0xFFFFFFFF)
_WORD_BITS = np.uint64(32)
_WORDS = 4

Words = NDArray[np.uint64]
"""32-bit numbers in 64 bits, which have room for their products."""


class Stream(IntEnum):
    """The purpose of a random number. Numbers of different streams are independent."""

    TOKEN = 0
    TOKEN_GROUP = 1


@dataclass(frozen=True, slots=True)
class Draw:
    """One random choice: the token at `position` (counted from the beginning of the prompt) of output `choice_index`.

    `seed` has 64 bits; `position` and `choice_index` have 32.
    """

    seed: int
    choice_index: int
    position: int


def philox4x32(counter: Words, key: Words) -> Words:
    """Returns four random 32-bit words `[4, ...]` for each counter `[4, ...]` and key `[2, ...]`. Further axes
    broadcast.

    A round treats words 0 and 2 alike, and words 1 and 3. Both pairs are computed at once.
    """
    multiplied, added = counter[0::2], counter[1::2]
    multipliers = _MULTIPLIERS.reshape(2, *(1,) * (counter.ndim - 1))
    weyl = _WEYL.reshape(_ROUNDS, 2, *(1,) * (key.ndim - 1))
    for round_key in (key + weyl) & _MASK:
        products = (multiplied * multipliers)[::-1]  # 64 bits each
        multiplied, added = (products >> _WORD_BITS) ^ added ^ round_key, products & _MASK
    return np.stack((multiplied[0], added[0], multiplied[1], added[1]))


def uniform(draws: Sequence[Draw], stream: Stream, first: Tensor, count: int) -> Tensor:
    """Returns the numbers `first[i] .. first[i] + count - 1` of draw i: `[len(draws), count]` float64 on the CPU,
    uniform on the 2**32 midpoints in (0, 1). `first` is `[len(draws)]` int64 on the CPU and has multiples of 4."""
    words = np.array(
        [(draw.seed & 0xFFFFFFFF, draw.seed >> 32, draw.position, draw.choice_index) for draw in draws], dtype=np.uint64
    ).T[:, :, np.newaxis]  # [4, num_draws, 1]
    num_counters = -(-count // _WORDS)
    counter = np.empty((4, len(draws), num_counters), dtype=np.uint64)
    counter[0] = first.numpy()[:, np.newaxis] // _WORDS + np.arange(num_counters)
    counter[1:3] = words[2:]
    counter[3] = stream
    outputs = philox4x32(counter, words[:2])  # [4, num_draws, num_counters]
    bits = np.moveaxis(outputs, 0, -1).reshape(len(draws), -1)[:, :count]
    return torch.from_numpy((bits + 0.5) * 2.0**-32)


def gumbel(numbers: Tensor) -> Tensor:
    """Turns uniform numbers in (0, 1) into standard Gumbel noise. Small numbers, which float64 resolves best, become
    large noise."""
    return -torch.log(-torch.log1p(-numbers))
