"""A compiled decoder layer over packed bfloat16 weights against its pieces, to the bit.

Gate and up of many rows are one product there, and what comes of them lies in tiles.
"""

import pytest
import torch
from paged_kernels import fused
from paged_kernels.base import AttentionMetadata
from paged_kernels.layer_stack import LayerStack, StackedLayer, projection
from paged_kernels.native import NativeBackend
from paged_kernels.packed import PackedWeight
from torch import Tensor

from tests.kernels.packed import by_hand, multiply

HEAD_COUNTS, HEAD_DIM, HIDDEN = (4, 2, 2), 16, 96
ROWS = (1, 4, 17, 32, 33, 45, 100, 530)
EPS, SCALE, BLOCK_SIZE = 1e-5, 0.25, 16


class Layer:
    """Random weights of one layer. Half of what gate and up give are whole panels, or not."""

    def __init__(self, size: int, hidden: int = HIDDEN, *, with_bias: bool) -> None:
        heads = sum(HEAD_COUNTS) * HEAD_DIM
        shapes = {"qkv": (heads, hidden), "output": (hidden, 64), "gate_up": (2 * size, hidden), "down": (hidden, size)}
        self.weights: dict[str, PackedWeight] = {
            name: by_hand((torch.randn(shape) * shape[1] ** -0.5).bfloat16()) for name, shape in shapes.items()
        }
        self.biases: dict[str, Tensor | None] = {
            name: torch.randn(shape[0]).bfloat16() if with_bias else None for name, shape in shapes.items()
        }
        self.norm = (1 + torch.randn(hidden) / 8).bfloat16()

    def compiled(self) -> LayerStack:
        made = {name: projection(weight, self.biases[name]) for name, weight in self.weights.items()}
        qkv, output, gate_up, down = made.values()
        assert qkv is not None and output is not None and gate_up is not None and down is not None
        layer = StackedLayer(
            qkv=qkv, output=output, gate_up=gate_up, down=down, input_norm=self.norm, norm=self.norm, query_norm=None,
            key_norm=None, window=None,
        )  # fmt: skip
        return LayerStack(
            [layer], final_norm=self.norm, eps=EPS, scale=SCALE, num_heads=HEAD_COUNTS[0], num_kv_heads=HEAD_COUNTS[1],
            head_dim=HEAD_DIM, kv_scales=None,
        )  # fmt: skip

    def in_pieces(self, x: Tensor, angles: tuple[Tensor, Tensor], kv_pool: Tensor, batch: AttentionMetadata) -> Tensor:
        heads = self.product("qkv", fused.rms_norm(x, self.norm, EPS)).view(x.shape[0], -1, HEAD_DIM)
        query, key, value = heads.split_with_sizes(HEAD_COUNTS, dim=1)
        native = NativeBackend()
        native.write_kv_rotary(query, key, value, angles, kv_pool, 0, batch.slot_mapping)
        attended = native.attend(query, kv_pool, 0, batch, scale=SCALE).view(x.shape[0], -1)
        normed, residual = fused.add_rms_norm(self.product("output", attended), x, self.norm, EPS)
        down = self.product("down", fused.silu_mul(self.product("gate_up", normed)))
        return fused.add_rms_norm(down, residual, self.norm, EPS)[0]

    def product(self, name: str, x: Tensor) -> Tensor:
        return multiply(x, self.weights[name], self.biases[name])


def one_sequence(num_tokens: int) -> AttentionMetadata:
    """All of it new."""
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    return AttentionMetadata(
        slot_mapping=torch.arange(num_tokens),
        block_tables=torch.arange(num_blocks, dtype=torch.int32)[None],
        query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32),
        seq_lens=torch.tensor([num_tokens], dtype=torch.int32),
        max_query_len=num_tokens,
        max_seq_len=num_tokens,
    )


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("size", [1088, 160, 40])
def test_the_same_as_its_pieces(size: int, with_bias: bool, instruction_set: str, num_threads: int) -> None:
    check(Layer(size, with_bias=with_bias), HIDDEN, ROWS)


def test_the_same_when_no_cache_holds_the_rows(instruction_set: str, num_threads: int) -> None:
    """Products go over the inputs in parts then, and over several panels of gate and up together."""
    check(Layer(2112, 2048, with_bias=True), 2048, (530,))


def check(layer: Layer, hidden: int, row_counts: tuple[int, ...]) -> None:
    compiled = layer.compiled()
    x = torch.randn(max(row_counts), hidden).bfloat16()
    turns = torch.randn(max(row_counts), HEAD_DIM // 2)
    angles = turns.cos(), turns.sin()
    pools = torch.zeros(2, -(-max(row_counts) // BLOCK_SIZE), HEAD_COUNTS[1], 1, 2, BLOCK_SIZE, HEAD_DIM).bfloat16()
    for num_rows in row_counts:
        batch, (cos, sin) = one_sequence(num_rows), (part[:num_rows] for part in angles)
        expected = layer.in_pieces(x[:num_rows], (cos, sin), pools[0], batch)
        assert torch.equal(compiled(x[:num_rows].clone(), cos, sin, pools[1], batch, lambda: None), expected)
        assert torch.equal(pools[0], pools[1])
