"""How a model holds its weights, and how a checkpoint's tensors get there."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import assert_never

import torch
from paged_kernels.prequantized_weight import PrequantizedFormat
from paged_kernels.quantized_weight import Bits
from paged_kernels.weight_memory import WeightMemory
from torch import Tensor

from kvrelay.core.option_types import Quantization


@dataclass(frozen=True, slots=True)
class CheckpointQuantization:
    """How a checkpoint was quantised before it was published: its `quantization_config`.

    `group_size` None: one group of all inputs. `zeros`: `qzeros` must be there, otherwise codes may count from the
    middle. `group_index`: `g_idx` must be there, for groups are in no order. `excluded`: names of modules, or ends or
    parts of them, that were left as they are.
    """

    format: PrequantizedFormat
    bits: Bits
    group_size: int | None
    zeros: bool
    group_index: bool
    excluded: tuple[str, ...]

    def __str__(self) -> str:
        groups = "one group per output" if self.group_size is None else f"groups of {self.group_size}"
        return f"{self.format.value}, {self.bits} bits, {groups}"


@dataclass(frozen=True, slots=True)
class PrequantizedTensors:
    """A quantised checkpoint's way of quantisation and the names of its tensors, which tell what it was done to."""

    quantization: CheckpointQuantization
    names: frozenset[str]

    def quantizes(self, module: str) -> bool:
        if any(f".{name}." in f".{module}." for name in self.quantization.excluded):
            return False
        return any(f"{module}.{kind}" in self.names for kind in ("qweight", "qzeros", "scales"))


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """`dtype` is that of activations, of KV unless it is FP8, and of all weights that are not quantised. `bits` is
    None, or the width of the decoder layers' matrices in weight-only quantisation, which is for the CPU. `prequantized`
    is of a checkpoint that is quantised already; `bits` is None then. `memory` is where weights lie on the CPU.
    """

    dtype: torch.dtype
    device: torch.device
    bits: Bits | None = None
    prequantized: PrequantizedTensors | None = None
    memory: WeightMemory = field(default_factory=WeightMemory, compare=False, repr=False)

    @property
    def head_bits(self) -> Bits | None:
        """Of the output head. Its errors go straight into the logits, so that it never gets less than 8."""
        return None if self.bits is None else 8

    def empty(self, *shape: int) -> Tensor:
        """For a weight."""
        return self.memory.empty(shape, self.dtype) if self.device.type == "cpu" else self.scratch(*shape)

    def scratch(self, *shape: int) -> Tensor:
        """For a tensor of the checkpoint on its way into a weight."""
        return torch.empty(*shape, dtype=self.dtype, device=self.device)


def bits_of(quantization: Quantization) -> Bits | None:
    match quantization:
        case "none":
            return None
        case "int8":
            return 8
        case "int4":
            return 4
        case _:
            assert_never(quantization)


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a tensor of the checkpoint goes: `open` gives contiguous memory of `shape` to copy it into, converting the
    dtype, and `filled` takes that memory back once it holds the whole tensor; it raises ValueError for values that can
    not be. At most one slot need be open at a time. `integers`: the tensor holds int32 instead of weights.
    """

    shape: tuple[int, ...]
    open: Callable[[], Tensor]
    filled: Callable[[Tensor], None]
    integers: bool = False


def slot_of(tensor: Tensor) -> Slot:
    """A slot that is the tensor itself, which must be contiguous."""
    return Slot(tuple(tensor.shape), lambda: tensor, lambda _: None)
