"""A decoder layer over packed bfloat16 weights, in two compiled calls, against its pieces, to the bit.

Gate and up of many rows are one product there, and what comes of them lies in tiles.
"""

import pytest
import torch
from paged_kernels import fused
from paged_kernels.decode_layer import DecodeLayer, projection
from paged_kernels.packed import PackedWeight
from torch import Tensor

from tests.kernels.test_packed import by_hand, multiply

HEAD_COUNTS, HEAD_DIM, HIDDEN = (4, 2, 2), 16, 96
ROWS = (1, 4, 32, 33, 45, 100, 530)
EPS = 1e-5


class Layer:
    """Random weights of one layer. Half of what gate and up give are whole panels, or not."""

    def __init__(self, size: int, *, with_bias: bool) -> None:
        heads = sum(HEAD_COUNTS) * HEAD_DIM
        shapes = {"qkv": (heads, HIDDEN), "output": (HIDDEN, 64), "gate_up": (2 * size, HIDDEN), "down": (HIDDEN, size)}
        self.weights: dict[str, PackedWeight] = {
            name: by_hand((torch.randn(shape) * shape[1] ** -0.5).bfloat16()) for name, shape in shapes.items()
        }
        self.biases: dict[str, Tensor | None] = {
            name: torch.randn(shape[0]).bfloat16() if with_bias else None for name, shape in shapes.items()
        }
        self.norm = (1 + torch.randn(HIDDEN) / 8).bfloat16()

    def compiled(self) -> DecodeLayer:
        made = {name: projection(weight, self.biases[name]) for name, weight in self.weights.items()}
        qkv, output, gate_up, down = made.values()
        assert qkv is not None and output is not None and gate_up is not None and down is not None
        return DecodeLayer(
            qkv=qkv,
            output=output,
            gate_up=gate_up,
            down=down,
            input_norm=self.norm,
            norm=self.norm,
            query_norm=None,
            key_norm=None,
            eps=EPS,
            head_counts=HEAD_COUNTS,
            head_dim=HEAD_DIM,
        )

    def finish(self, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        normed, total = fused.add_rms_norm(self.product("output", attended), residual, self.norm, EPS)
        return self.product("down", fused.silu_mul(self.product("gate_up", normed))), total

    def product(self, name: str, x: Tensor) -> Tensor:
        return multiply(x, self.weights[name], self.biases[name])


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("size", [1088, 160, 40])
def test_after_attention(size: int, with_bias: bool, instruction_set: str, num_threads: int) -> None:
    layer = Layer(size, with_bias=with_bias)
    compiled = layer.compiled()
    attended, residual = torch.randn(max(ROWS), 64).bfloat16(), torch.randn(max(ROWS), HIDDEN).bfloat16()
    for num_rows in ROWS:
        expected = layer.finish(attended[:num_rows], residual[:num_rows])
        actual = compiled.finish(attended[:num_rows], residual[:num_rows])
        assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])
