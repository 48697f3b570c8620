"""A compiled decoder layer over packed bfloat16 weights against its pieces, to the bit.

Gate and up of many rows are one product there, and what comes of them lies in tiles.
"""

import pytest

from tests.kernels.layer import Layer
from tests.kernels.packed import by_hand

ROWS = (1, 4, 17, 32, 33, 45, 100, 530)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("size", [1088, 160, 40])  # half of what gate and up give are whole panels, or not
def test_the_same_as_its_pieces(size: int, with_bias: bool, instruction_set: str, num_threads: int) -> None:
    Layer(by_hand, size, with_bias=with_bias).assert_same_as_its_pieces(ROWS)


def test_the_same_when_no_cache_holds_the_rows(instruction_set: str, num_threads: int) -> None:
    """Products go over the inputs in parts then, and over several panels of gate and up together."""
    Layer(by_hand, 704, 5248, with_bias=True).assert_same_as_its_pieces((530,))
