"""A linear layer whose weights are quantised to 8 or 4 bits while they are loaded.

Invariant: no more than one tensor of the checkpoint is held in full precision at a time.
"""

from collections.abc import Iterator, Sequence
from functools import partial

from paged_kernels.cpu.quantized import empty_weight, linear, pack_rows
from paged_kernels.cpu.quantized_weight import Bits
from torch import Tensor

from kvrelay.engine.layers.weight_format import Slot, WeightFormat, slot_of


class QuantizedLinear:
    """A `LinearLayer` with weight-only quantisation, on the CPU. Activations and bias keep the format's dtype."""

    def __init__(
        self, parts: Sequence[tuple[str, int]], num_inputs: int, *, bias: bool, weights: WeightFormat, bits: Bits
    ) -> None:
        num_outputs = sum(size for _, size in parts)
        self.parts = tuple(parts)
        self.format = weights
        self.weight = empty_weight(num_outputs, num_inputs, bits, weights.memory)
        self.bias = weights.empty(num_outputs) if bias else None  # [num_outputs]

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    @property
    def num_bytes(self) -> int:
        return self.weight.num_bytes

    def fill(self, first_output: int, rows: Tensor) -> None:
        """Quantises `rows`, `[num_rows, num_inputs]`, into the outputs from `first_output` on."""
        pack_rows(self.weight, rows, first_output)

    def pack(self) -> None:
        """Does nothing: the weights are in their final order from the start."""

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        begin = 0
        for name, size in self.parts:
            shape = (size, self.weight.num_inputs)
            yield f"{prefix}{name}.weight", Slot(shape, partial(self.format.scratch, *shape), partial(self.fill, begin))
            if self.bias is not None:
                yield f"{prefix}{name}.bias", slot_of(self.bias[begin : begin + size])
            begin += size
