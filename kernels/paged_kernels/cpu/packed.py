"""Linear layers over bfloat16 weights on the CPU, in the order in which our kernels read them
(`csrc/linear/packed_linear.h`): compiled, for any number of rows. Elsewhere torch multiplies.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from paged_kernels.cpu.extension import load_extension
from paged_kernels.cpu.threads import num_threads
from paged_kernels.cpu.weight_memory import WeightMemory

PANEL_OUTPUTS = 32
INPUT_MULTIPLE = 32


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight `[num_outputs, num_inputs]` as panels `[num_panels, padded inputs * 32]`."""

    panels: Tensor
    num_outputs: int
    num_inputs: int


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Returns whether our kernels should multiply with such weights: not if this processor has only the portable ones,
    which torch outruns."""
    native = load_extension()
    if dtype is not torch.bfloat16 or device.type != "cpu" or native is None:
        return False
    return native.available_instruction_sets()[0] != "portable"


def empty_weight(num_outputs: int, num_inputs: int, memory: WeightMemory | None = None) -> PackedWeight:
    """Returns room for a weight for which `can_pack` holds, in `memory` or newly allocated. It is undefined until every
    row has been through `pack_rows`."""
    memory = memory or WeightMemory()
    num_panels, padded_inputs = -(-num_outputs // PANEL_OUTPUTS), -(-num_inputs // INPUT_MULTIPLE) * INPUT_MULTIPLE
    panels = memory.empty((num_panels, padded_inputs * PANEL_OUTPUTS), torch.bfloat16)
    if not memory.is_filled:
        panels[-1].zero_()  # outputs that only fill the last panel
    return PackedWeight(panels, num_outputs, num_inputs)


def pack_rows(target: PackedWeight, rows: Tensor, first_output: int) -> None:
    """Copies `[num_rows, num_inputs]` into outputs `first_output` and following. Raises ValueError for rows that do not
    fit."""
    native = load_extension()
    assert native is not None
    native.fill_panels(target.panels, rows, first_output, target.num_outputs, num_threads())


def take_rows(weight: PackedWeight, outputs: Tensor) -> Tensor:
    """Returns the weights of `outputs` (int64 `[num_rows]`) as they were before they were packed, `[num_rows,
    num_inputs]`. Raises ValueError for an output that does not exist."""
    native = load_extension()
    assert native is not None
    out = torch.empty(outputs.shape[0], weight.num_inputs, dtype=torch.bfloat16)
    native.take_rows(out, weight.panels, outputs, weight.num_outputs, num_threads())
    return out


def pack(weight: Tensor) -> PackedWeight:
    """Returns a packed copy of `[num_outputs, num_inputs]`, for which `can_pack` holds."""
    target = empty_weight(*weight.shape)
    pack_rows(target, weight, 0)
    return target


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Multiplies bfloat16 `[num_rows, num_inputs]` to `[num_rows, num_outputs]`; sums are float32."""
    native = load_extension()
    assert native is not None
    out = torch.empty(x.shape[0], weight.num_outputs, dtype=torch.bfloat16)
    native.packed_matmul(out, x, weight.panels, bias, num_threads())
    return out
