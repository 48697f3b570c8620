"""Rotary position embedding (Su et al. 2021, "RoFormer", arXiv:2104.09864) and ways to stretch it over longer contexts.

Invariant: the rotation of a token is a pure function of its position. KV blocks are named by their tokens and shared
between sequences, so it must depend neither on the length of the sequence nor on how the prompt was cut into chunks.
"""

import math
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor


class RopeKind(Enum):
    """The way in which inverse frequencies are derived from theta. Values are the names that checkpoints use.

    `LINEAR`: position interpolation (Chen et al. 2023, arXiv:2306.15595). `DYNAMIC`: NTK-aware scaling whose base
    grows with the length (Peng et al. 2023, "YaRN", arXiv:2309.00071, section 3.3). `LLAMA3`:
    interpolation by wavelength (Grattafiori et al. 2024, "The Llama 3 Herd of Models", arXiv:2407.21783). `YARN`:
    NTK-by-parts with attention scaling (arXiv:2309.00071, sections 3.2 and 3.4).
    """

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """The parameters of a rotary embedding. Fields that a kind does not use keep their defaults. Lengths are in tokens.

    `original_max_position_embeddings` is the length that the model was trained with, before stretching.
    `attention_factor` multiplies cos and sin; it differs from 1 only for YaRN.
    """

    kind: RopeKind
    theta: float
    original_max_position_embeddings: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


class RotaryTable:
    """A table of cos and sin for every position below `max_positions`: float32, `[max_positions, head_dim // 2]` each,
    0.5 GB for a million positions of a usual model."""

    def __init__(self, rope: RopeParameters, *, head_dim: int, max_positions: int, device: torch.device) -> None:
        positions = torch.arange(max_positions, dtype=torch.float32)
        angles = positions[:, None] * inverse_frequencies(rope, head_dim=head_dim, max_positions=max_positions)
        self.cos = angles.cos().mul_(rope.attention_factor).to(device)
        self.sin = angles.sin_().mul_(rope.attention_factor).to(device)

    def keep(self, num_positions: int) -> None:
        """Gives up the positions from `num_positions` on, and their memory."""
        if num_positions < len(self.cos):
            self.cos, self.sin = self.cos[:num_positions].clone(), self.sin[:num_positions].clone()

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cos and sin, `[num_tokens, head_dim // 2]` each, of `positions`, `[num_tokens]` int64."""
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)


def inverse_frequencies(rope: RopeParameters, *, head_dim: int, max_positions: int) -> Tensor:
    """Returns the inverse frequencies: float32, `[head_dim // 2]`, or `[max_positions, head_dim // 2]` for DYNAMIC.

    DYNAMIC is plain RoPE within `original_max_position_embeddings`. A token at a position p beyond it gets the
    frequencies of a sequence of p + 1 tokens, as if the sequence were decoded token by token. (Rotating a long prompt
    as a whole by its final length, as an implementation without paging may, would give the same tokens different KV in
    different prompts.)
    """
    if rope.kind is RopeKind.DYNAMIC:
        return _dynamic(rope, head_dim, max_positions)
    plain = 1.0 / _powers(rope.theta, head_dim)
    if rope.kind is RopeKind.LINEAR:
        return plain / rope.factor
    if rope.kind is RopeKind.LLAMA3:
        return _llama3(rope, plain)
    if rope.kind is RopeKind.YARN:
        return _yarn(rope, plain, head_dim)
    return plain


def yarn_attention_factor(factor: float, mscale: float, mscale_all_dim: float) -> float:
    """Returns YaRN's attention factor (arXiv:2309.00071, section 3.4). The form with two multipliers, unless one of
    them is 0, is that of DeepSeek-V2 (arXiv:2405.04434)."""

    def scale(multiplier: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * multiplier * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        return scale(mscale) / scale(mscale_all_dim)
    return scale(1.0)


def _powers(theta: float | Tensor, head_dim: int) -> Tensor:
    """Returns theta ** (2i / head_dim) for i in 0 .. head_dim / 2 - 1. `theta` may be `[n, 1]`."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    powers: Tensor = theta**exponents
    return powers


def _dynamic(rope: RopeParameters, head_dim: int, max_positions: int) -> Tensor:
    trained = rope.original_max_position_embeddings
    lengths = torch.arange(1, max_positions + 1, dtype=torch.float32).clamp(min=trained)  # [max_positions]
    growth = (rope.factor * lengths / trained) - (rope.factor - 1)
    theta = rope.theta * growth ** (head_dim / (head_dim - 2))
    return 1.0 / _powers(theta[:, None], head_dim)


def _llama3(rope: RopeParameters, plain: Tensor) -> Tensor:
    """Interpolates long wavelengths, keeps short ones, and blends those between by how often they turn in the trained
    length."""
    turns = rope.original_max_position_embeddings * plain / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * plain / rope.factor + blend * plain


def _yarn(rope: RopeParameters, plain: Tensor, head_dim: int) -> Tensor:
    """Interpolates dimensions that turn less than `beta_slow` times, keeps those that turn more than `beta_fast` times,
    and blends those between linearly."""

    def dimension_of(turns: float) -> float:
        trained = rope.original_max_position_embeddings
        return head_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return plain / rope.factor * ramp + plain * (1 - ramp)
