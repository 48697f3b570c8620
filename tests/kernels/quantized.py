"""Weights that are rounded to nearest, as `--quantization` does while loading."""

from paged_kernels.cpu import quantized
from paged_kernels.cpu.quantized_weight import Bits, QuantizedWeight
from torch import Tensor


def to_nearest(rows: Tensor, bits: Bits) -> QuantizedWeight:
    weight = quantized.empty_weight(rows.shape[0], rows.shape[1], bits)
    quantized.pack_rows(weight, rows, 0)
    return weight
