"""A weight of 8 or 4 bits in packed form. The format is in `csrc/quantized/quantized.h`."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

PANEL_OUTPUTS = 16

Bits = Literal[8, 4]


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight `[num_outputs, num_inputs]` in packed form. Undefined until every row has been through `pack_rows`.

    With `zeros` a weight is (code - zero) * scale and scales are float32, otherwise codes count from the middle.
    """

    packed: Tensor  # [num_panels, bytes of a panel] uint8
    scales: Tensor  # [num_panels, num_groups, PANEL_OUTPUTS] bfloat16
    num_outputs: int
    num_inputs: int
    bits: Bits
    group_size: int
    zeros: Tensor | None = None  # like scales, bfloat16, whole numbers from 0 to 2^bits

    @property
    def num_bytes(self) -> int:
        return self.packed.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)
