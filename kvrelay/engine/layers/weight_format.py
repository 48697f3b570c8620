"""How a model holds its weights, and how a checkpoint's tensors get there."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from paged_kernels.quantized import Bits
from torch import Tensor

Quantization = Literal["none", "int8", "int4"]


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """`dtype` is that of activations, of KV unless it is FP8, and of all weights that are not quantised. `bits` is
    None, or the width of the decoder layers' matrices in weight-only quantisation, which is for the CPU.
    """

    dtype: torch.dtype
    device: torch.device
    bits: Bits | None = None

    @property
    def head_bits(self) -> Bits | None:
        """Of the output head. Its errors go straight into the logits, so that it never gets less than 8."""
        return None if self.bits is None else 8

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(*shape, dtype=self.dtype, device=self.device)


def bits_of(quantization: Quantization) -> Bits | None:
    match quantization:
        case "none":
            return None
        case "int8":
            return 8
        case "int4":
            return 4


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a tensor of the checkpoint goes: `open` gives contiguous memory of `shape` to copy it into, converting the
    dtype, and `filled` takes that memory back once it holds the whole tensor. At most one slot need be open at a time.
    """

    shape: tuple[int, ...]
    open: Callable[[], Tensor]
    filled: Callable[[Tensor], None]


def slot_of(tensor: Tensor) -> Slot:
    """A slot that is the tensor itself, which must be contiguous."""
    return Slot(tuple(tensor.shape), lambda: tensor, lambda _: None)
