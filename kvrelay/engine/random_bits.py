"""Randomness without state: every number is a pure function of (seed, choice index, position, stream, index).

Philox4x32 with 10 rounds, a counter-based generator: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as
1, 2, 3" (SC'11). The key is the seed; the counter is (index // 4, position, choice index, stream), and the four words
of one output serve four consecutive indices. Invariant: a number does not depend on the batch, on its order, or on what
was drawn before; the bits are the same on every machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_WORDS = 4


class Stream(IntEnum):
    """What a number is for; numbers of different streams are independent."""

    TOKEN = 0
    TOKEN_GROUP = 1


@dataclass(frozen=True, slots=True)
class Draw:
    """One random choice: that of the token at `position` (of the sequence, prompt included) of output `choice_index`.

    `seed` has 64 bits; `position` and `choice_index` have 32.
    """

    seed: int
    choice_index: int
    position: int


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random 32-bit words for each counter and key. All tensors are int64 with values below 2**32, and
    broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # An int64 product wraps around, and so holds the 64 bits of the unsigned product.
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0 = ((product1 >> 32) & _MASK) ^ c1 ^ k0
        c1 = product1 & _MASK
        c2 = ((product0 >> 32) & _MASK) ^ c3 ^ k1
        c3 = product0 & _MASK
        k0 = (k0 + _WEYL[0]) & _MASK
        k1 = (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(draws: Sequence[Draw], stream: Stream, first: Tensor, count: int) -> Tensor:
    """Numbers `first[i] .. first[i] + count - 1` of draw i: `[len(draws), count]` float64, uniform on the 2**32
    midpoints in (0, 1).

    `first` is `[len(draws)]` int64 of multiples of 4; the result is on its device.
    """
    device = first.device
    words = torch.tensor(
        [(draw.seed & _MASK, draw.seed >> 32, draw.position, draw.choice_index) for draw in draws],
        dtype=torch.int64,
        device=device,
    ).T.unsqueeze(-1)  # [4, num_draws, 1]
    seed_low, seed_high, position, choice_index = words.unbind()
    num_counters = -(-count // _WORDS)
    index = first.unsqueeze(-1) // _WORDS + torch.arange(num_counters, device=device)  # [num_draws, num_counters]
    outputs = philox4x32((index, position, choice_index, torch.full_like(position, stream)), (seed_low, seed_high))
    bits = torch.stack(outputs, dim=-1).flatten(1)[:, :count]
    return (bits.to(torch.float64) + 0.5) * 2.0**-32


def gumbel(numbers: Tensor) -> Tensor:
    """Standard Gumbel noise from uniform numbers in (0, 1); small numbers, which float64 resolves best, become large
    noise."""
    return -torch.log(-torch.log1p(-numbers))
