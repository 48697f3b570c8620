"""A compiled decoder layer beside its pieces."""

from collections.abc import Callable

import torch
from paged_kernels import fused
from paged_kernels.base import AttentionMetadata
from paged_kernels.cpu import quantized
from paged_kernels.cpu.layer_stack import LayerStack, StackedLayer, projection
from paged_kernels.cpu.native import NativeBackend
from paged_kernels.cpu.packed import PackedWeight
from paged_kernels.cpu.quantized_weight import QuantizedWeight
from torch import Tensor

from tests.kernels.packed import multiply

Weight = PackedWeight | QuantizedWeight
HEAD_COUNTS, HEAD_DIM, HIDDEN = (4, 2, 2), 16, 96
EPS, SCALE, BLOCK_SIZE = 1e-5, 0.25, 16


class Layer:
    """Random weights of one layer, each packed by `pack`. `size`: how many outputs gate and up have, each."""

    def __init__(self, pack: Callable[[Tensor], Weight], size: int, hidden: int = HIDDEN, *, with_bias: bool) -> None:
        heads = sum(HEAD_COUNTS) * HEAD_DIM
        shapes = {"qkv": (heads, hidden), "output": (hidden, 64), "gate_up": (2 * size, hidden), "down": (hidden, size)}
        self._hidden = hidden
        self.weights = {
            name: pack((torch.randn(shape) * shape[1] ** -0.5).bfloat16()) for name, shape in shapes.items()
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
        weight, bias = self.weights[name], self.biases[name]
        return multiply(x, weight, bias) if isinstance(weight, PackedWeight) else quantized.linear(x, weight, bias)

    def assert_same_as_its_pieces(self, row_counts: tuple[int, ...]) -> None:
        """Raises AssertionError unless the compiled layer computes what its pieces do, KV included, to the bit."""
        compiled = self.compiled()
        x = torch.randn(max(row_counts), self._hidden).bfloat16()
        turns = torch.randn(max(row_counts), HEAD_DIM // 2)
        angles = turns.cos(), turns.sin()
        num_blocks = -(-max(row_counts) // BLOCK_SIZE)
        pools = torch.zeros(2, num_blocks, HEAD_COUNTS[1], 1, 2, BLOCK_SIZE, HEAD_DIM).bfloat16()
        for num_rows in row_counts:
            batch, (cos, sin) = one_sequence(num_rows), (part[:num_rows] for part in angles)
            expected = self.in_pieces(x[:num_rows], (cos, sin), pools[0], batch)
            assert torch.equal(compiled(x[:num_rows].clone(), cos, sin, pools[1], batch, None), expected)
            assert torch.equal(pools[0], pools[1])


def one_sequence(num_tokens: int) -> AttentionMetadata:
    """Returns the metadata of a step that computes a whole sequence."""
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    return AttentionMetadata(
        slot_mapping=torch.arange(num_tokens),
        block_tables=torch.arange(num_blocks, dtype=torch.int32)[None],
        query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32),
        seq_lens=torch.tensor([num_tokens], dtype=torch.int32),
        max_query_len=num_tokens,
        max_seq_len=num_tokens,
    )
