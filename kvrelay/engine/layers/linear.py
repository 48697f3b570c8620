"""Linear layers. One may hold several of a checkpoint's layers side by side, so that they are one matrix product.

Invariant: a layer owns its weights. Before `pack` they can be filled; after it they can only be used.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Protocol

import torch
import torch.nn.functional as F
from paged_kernels.cpu import packed
from paged_kernels.cpu.packed import PackedWeight
from paged_kernels.cpu.quantized_weight import Bits
from torch import Tensor

from kvrelay.engine.layers.prequantized_linear import PrequantizedLinear
from kvrelay.engine.layers.quantized_linear import QuantizedLinear
from kvrelay.engine.layers.weight_format import Slot, WeightFormat, slot_of


class LinearLayer(Protocol):
    """What the decoder needs of a linear layer. Its weights are undefined until every slot has been filled. It can be
    called only after `pack`."""

    def __call__(self, x: Tensor) -> Tensor:
        """Multiplies `[num_tokens, num_inputs]` with the weights and returns `[num_tokens, num_outputs]`."""

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        """Yields the name in the checkpoint and the slot of every tensor. Not allowed after `pack`."""

    def pack(self) -> None:
        """Brings the weights into the order in which they are read fastest. Called once, after loading."""

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of weights that a product reads. Allowed only after `pack`."""


def make_linear(
    parts: Sequence[tuple[str, int]],
    num_inputs: int,
    *,
    bias: bool,
    weights: WeightFormat,
    prefix: str,
) -> LinearLayer:
    """Returns a layer that joins the checkpoint's layers in `parts`, pairs of name and number of outputs, in that
    order. In the checkpoint `prefix` precedes the names. Layers that the checkpoint has quantised stay quantised."""
    prequantized = weights.prequantized
    if prequantized is None:
        return make_plain_linear(parts, num_inputs, bias=bias, weights=weights, bits=weights.bits)
    layers: list[LinearLayer] = []
    for quantized, run in groupby(parts, lambda part: prequantized.quantizes(f"{prefix}{part[0]}")):
        if quantized:
            layers.append(PrequantizedLinear(list(run), num_inputs, bias=bias, weights=weights, prefix=prefix))
        else:
            layers.append(Linear(list(run), num_inputs, bias=bias, weights=weights))
    return layers[0] if len(layers) == 1 else LinearsApart(layers)


def make_plain_linear(
    parts: Sequence[tuple[str, int]], num_inputs: int, *, bias: bool, weights: WeightFormat, bits: Bits | None
) -> LinearLayer:
    """Returns a layer like `make_linear`, for weights that the checkpoint has not quantised. With `bits` they are
    quantised while loading."""
    if bits is None:
        return Linear(parts, num_inputs, bias=bias, weights=weights)
    return QuantizedLinear(parts, num_inputs, bias=bias, weights=weights, bits=bits)


class Linear:
    """A `LinearLayer` whose weights have the format's dtype. If there are kernels for packed weights, weights are
    packed as they are read, and no more than one tensor of the checkpoint is held besides them."""

    def __init__(self, parts: Sequence[tuple[str, int]], num_inputs: int, *, bias: bool, weights: WeightFormat) -> None:
        num_outputs = sum(size for _, size in parts)
        self.parts = tuple(parts)
        self.num_outputs = num_outputs
        self.num_inputs = num_inputs
        self.dtype = weights.dtype
        self.format = weights
        self.weight: Tensor | PackedWeight = (
            packed.empty_weight(num_outputs, num_inputs, weights.memory)
            if packed.can_pack(weights.dtype, weights.device)
            else weights.empty(num_outputs, num_inputs)
        )
        self.bias = weights.empty(num_outputs) if bias else None  # [num_outputs]

    def __call__(self, x: Tensor) -> Tensor:
        if isinstance(self.weight, PackedWeight):
            return packed.linear(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)

    def rows(self, outputs: Tensor) -> Tensor:
        """Returns the weights of `outputs` (`[num_rows]` int64) as they were filled in, `[num_rows, num_inputs]`."""
        if isinstance(self.weight, PackedWeight):
            return packed.take_rows(self.weight, outputs)
        return self.weight.index_select(0, outputs)

    @property
    def num_bytes(self) -> int:
        return self.num_outputs * self.num_inputs * self.dtype.itemsize

    def fill(self, first_output: int, rows: Tensor) -> None:
        """Sets the weights of the outputs from `first_output` on to `rows`, `[num_rows, num_inputs]`."""
        if isinstance(self.weight, PackedWeight):
            packed.pack_rows(self.weight, rows, first_output)
        else:
            self.weight[first_output : first_output + rows.shape[0]].copy_(rows)

    def pack(self) -> None:
        """Does nothing: rows were packed as they were read."""

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        begin = 0
        for name, size in self.parts:
            yield f"{prefix}{name}.weight", self._weight_slot(begin, size)
            if self.bias is not None:
                yield f"{prefix}{name}.bias", slot_of(self.bias[begin : begin + size])
            begin += size

    def _weight_slot(self, begin: int, size: int) -> Slot:
        """Returns a slot over a view of the weights or, if they are packed, over memory that is packed once it is
        full."""
        if isinstance(self.weight, Tensor):
            return slot_of(self.weight[begin : begin + size])
        shape = (size, self.num_inputs)
        return Slot(shape, partial(self.format.scratch, *shape), partial(self.fill, begin))


class LinearsApart:
    """A `LinearLayer` of several layers side by side, of which only some are quantised."""

    def __init__(self, layers: Sequence[LinearLayer]) -> None:
        self.layers = tuple(layers)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([layer(x) for layer in self.layers], dim=1)

    @property
    def num_bytes(self) -> int:
        return sum(layer.num_bytes for layer in self.layers)

    def pack(self) -> None:
        for layer in self.layers:
            layer.pack()

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        for layer in self.layers:
            yield from layer.slots(prefix)
