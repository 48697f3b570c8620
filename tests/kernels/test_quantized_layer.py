"""A compiled decoder layer over quantised weights against its pieces, to the bit.

Where rows are so many that weights are widened, gate and up are one product there.
"""

from functools import partial

import pytest
import torch
from paged_kernels.cpu import quantized
from paged_kernels.cpu.quantized_weight import Bits, QuantizedWeight
from torch import Tensor

from tests.kernels.layer import Layer
from tests.kernels.quantized import to_nearest

BITS: tuple[Bits, ...] = (8, 4)
ROWS = (1, 16, 33, 70, 120, 530)


def with_zeros(rows: Tensor) -> QuantizedWeight:
    """As a checkpoint of 4 bits has them, in groups of 32."""
    num_outputs, num_inputs = rows.shape
    num_groups = -(-num_inputs // 32)
    codes = torch.randint(0, 16, (num_inputs, num_outputs), dtype=torch.uint8)
    zeros = torch.randint(1, 16, (num_groups, num_outputs))
    scales = (torch.rand(num_groups, num_outputs) + 0.5) / (8 * num_inputs**0.5)
    return quantized.pack_codes(codes, zeros, scales, 4, 32)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("size", [1088, 160, 40])  # half of what gate and up give are whole panels, or not
@pytest.mark.parametrize("bits", BITS)
def test_the_same_as_its_pieces(bits: Bits, size: int, with_bias: bool, instruction_set: str, num_threads: int) -> None:
    Layer(partial(to_nearest, bits=bits), size, with_bias=with_bias).assert_same_as_its_pieces(ROWS)


def test_with_zeros(instruction_set: str, num_threads: int) -> None:
    Layer(with_zeros, 160, with_bias=True).assert_same_as_its_pieces(ROWS)


def test_the_same_when_no_cache_holds_the_rows(instruction_set: str) -> None:
    """Products go over the inputs in parts then, and fewer panels are widened together."""
    Layer(partial(to_nearest, bits=8), 2112, 2048, with_bias=True).assert_same_as_its_pieces((530,))
