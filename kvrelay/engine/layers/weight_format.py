"""How a model stores its weights, and where the tensors of a checkpoint are copied to."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import assert_never

import torch
from paged_kernels.cpu.quantized_weight import Bits
from paged_kernels.cpu.weight_memory import WeightMemory
from paged_kernels.prequantized_weight import PrequantizedFormat
from torch import Tensor

from kvrelay.core.config.option_types import Quantization


@dataclass(frozen=True, slots=True)
class CheckpointQuantization:
    """How a checkpoint was quantised before it was published: its `quantization_config`.

    `group_size` is None if all inputs are one group. With `zeros`, the tensors `qzeros` are required; without it and
    them, codes count from the middle of their range. With `group_index`, the tensors `g_idx` are required, because the
    groups are in no order. `excluded` has the names of modules that are not quantised, or parts of these names.
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
    """The quantisation of a checkpoint, and the names of its tensors, from which follows which modules it covers."""

    quantization: CheckpointQuantization
    names: frozenset[str]

    def quantizes(self, module: str) -> bool:
        """Tells whether a module is quantised: it has packed tensors and is not excluded."""
        if any(f".{name}." in f".{module}." for name in self.quantization.excluded):
            return False
        return any(f"{module}.{kind}" in self.names for kind in ("qweight", "qzeros", "scales"))


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How the weights of a model are stored.

    `dtype` is that of activations, of KV unless it is FP8, and of all weights that are not quantised. `bits` is the
    width of the decoder layers' weights if they are quantised while loading, which works on the CPU only, else None.
    `prequantized` describes a checkpoint that is quantised already; `bits` is then None. `memory` provides memory for
    weights on the CPU.
    """

    dtype: torch.dtype
    device: torch.device
    bits: Bits | None = None
    prequantized: PrequantizedTensors | None = None
    memory: WeightMemory = field(default_factory=WeightMemory, compare=False, repr=False)

    @property
    def head_bits(self) -> Bits | None:
        """Returns the width of the output head: never less than 8, because its errors go straight into the logits."""
        return None if self.bits is None else 8

    def empty(self, *shape: int) -> Tensor:
        """Returns memory for a weight."""
        return self.memory.empty(shape, self.dtype) if self.device.type == "cpu" else self.scratch(*shape)

    def scratch(self, *shape: int) -> Tensor:
        """Returns memory for a tensor of the checkpoint that is converted into a weight."""
        return torch.empty(*shape, dtype=self.dtype, device=self.device)


def bits_of(quantization: Quantization) -> Bits | None:
    """Returns the width of quantised weights, or None."""
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
    """The place of one tensor of the checkpoint.

    `open` returns contiguous memory of `shape` to copy the tensor into, converting its dtype. `filled` is called with
    that memory once it holds the whole tensor, and raises ValueError for values that a valid tensor cannot have. At
    most one slot is open at a time. `integers` says that the tensor has int32 codes or indices instead of weights.
    """

    shape: tuple[int, ...]
    open: Callable[[], Tensor]
    filled: Callable[[Tensor], None]
    integers: bool = False


def slot_of(tensor: Tensor) -> Slot:
    """Returns a slot whose memory is `tensor` itself, which must be contiguous."""
    return Slot(tuple(tensor.shape), lambda: tensor, lambda _: None)
