"""Linear layers with weights that AWQ or GPTQ has quantised.

Invariant: products use exactly the checkpoint's codes, zeros and scales. Until `pack` the layer holds the tensors as
they are stored; `pack` joins the parts along their outputs and converts them into the device's form. Parts whose inputs
are grouped differently (`desc_act`) cannot be joined and are multiplied one by one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Protocol

import torch
from paged_kernels.cpu import repacked
from paged_kernels.cpu.quantized_weight import QuantizedWeight
from paged_kernels.cpu.weight_memory import WeightMemory
from paged_kernels.prequantized_weight import PrequantizedFormat, PrequantizedWeight, in_group_order
from torch import Tensor

from kvrelay.core.errors import ModelLoadError
from kvrelay.engine.layers.weight_format import CheckpointQuantization, Slot, WeightFormat, slot_of

_MIDDLE_ZEROS = -0x77777778  # eight times 8, as int32: AWQ without zero points


class Product(Protocol):
    """A weight in the form that a device multiplies with."""

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiplies `[num_tokens, num_inputs]` with the weight and returns `[num_tokens, num_outputs]`."""

    @property
    def num_bytes(self) -> int: ...


class RepackedProduct:
    """The product on a CPU, over codes in the order that its integer kernels read."""

    def __init__(self, weight: PrequantizedWeight, memory: WeightMemory) -> None:
        self.weight = repacked.repack(weight, memory)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return repacked.linear(x, self.weight, bias)

    @property
    def num_bytes(self) -> int:
        return self.weight.num_bytes


class TritonProduct:
    """The product on a GPU, over the tensors as the checkpoint stores them; inputs are sorted by group."""

    def __init__(self, weight: PrequantizedWeight) -> None:
        from paged_kernels.gpu.prequantized import prequantized_matmul  # Triton is installed only where GPUs are

        self._input_order: Tensor | None = None
        if weight.group_of_input is not None:
            weight, self._input_order = in_group_order(weight)
        self.weight = weight
        self._matmul = prequantized_matmul

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        ordered = x if self._input_order is None else x.index_select(1, self._input_order)
        return self._matmul(ordered, self.weight, bias)

    @property
    def num_bytes(self) -> int:
        order = 0 if self._input_order is None else self._input_order.nbytes
        return self.weight.codes.nbytes + self.weight.zeros.nbytes + self.weight.scales.nbytes + order


def product_for(weight: PrequantizedWeight, memory: WeightMemory) -> Product:
    return RepackedProduct(weight, memory) if weight.codes.device.type == "cpu" else TritonProduct(weight)


@dataclass(slots=True)
class _Part:
    """One layer of the checkpoint, with the tensors read so far by the last word of their names."""

    name: str
    num_outputs: int
    tensors: dict[str, Tensor] = field(default_factory=dict)


class PrequantizedLinear:
    """A `LinearLayer` whose parts are all quantised as `weights.prequantized` says. A part's name in the checkpoint is
    `prefix` followed by its name.

    Raises ModelLoadError for sizes that do not fit the quantisation.
    """

    def __init__(
        self,
        parts: Sequence[tuple[str, int]],
        num_inputs: int,
        *,
        bias: bool,
        weights: WeightFormat,
        prefix: str,
    ) -> None:
        prequantized = weights.prequantized
        assert prequantized is not None
        self.num_inputs = num_inputs
        self.quantization = prequantized.quantization
        self.group_size = prequantized.quantization.group_size or num_inputs
        self.bias = weights.empty(sum(size for _, size in parts)) if bias else None  # [num_outputs]
        self._device = weights.device
        self._memory = weights.memory
        self._parts = [_Part(name, size) for name, size in parts]
        self._names = prequantized.names
        self._products: list[tuple[Product, Tensor | None]] = []  # each with the bias of its outputs
        self._check_sizes(prefix)

    def __call__(self, x: Tensor) -> Tensor:
        outputs = [product(x, bias) for product, bias in self._products]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    @property
    def num_bytes(self) -> int:
        return sum(product.num_bytes for product, _ in self._products)

    @property
    def whole_weight(self) -> QuantizedWeight | None:
        """Returns the weight of all parts on a CPU. None if there are several products, or one reorders its inputs."""
        product = self._products[0][0] if len(self._products) == 1 else None
        if not isinstance(product, RepackedProduct) or product.weight.input_order is not None:
            return None
        return product.weight.weight

    def pack(self) -> None:
        begin = 0
        for run in _joinable(self._parts):
            end = begin + sum(part.num_outputs for part in run)
            weight = _join(run, self.quantization, self.group_size)
            self._products.append(
                (product_for(weight, self._memory), None if self.bias is None else self.bias[begin:end])
            )
            begin = end
        self._parts.clear()

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        begin = 0
        for part in self._parts:
            module = f"{prefix}{part.name}"
            for kind, shape in self._shapes(module, part.num_outputs):
                yield f"{module}.{kind}", self._slot(part, kind, shape)
            if self.bias is not None:
                yield f"{module}.bias", slot_of(self.bias[begin : begin + part.num_outputs])
            begin += part.num_outputs

    def _shapes(self, module: str, num_outputs: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields the last word of the name, and the shape, of every tensor that a module must have."""
        per_word, num_groups = 32 // self.quantization.bits, self.num_inputs // self.group_size
        is_awq = self.quantization.format is PrequantizedFormat.AWQ
        codes = (self.num_inputs, num_outputs // per_word) if is_awq else (self.num_inputs // per_word, num_outputs)
        yield "qweight", codes
        yield "scales", (num_groups, num_outputs)
        if self.quantization.zeros or f"{module}.qzeros" in self._names:
            yield "qzeros", (num_groups, num_outputs // per_word)
        if self.quantization.group_index or (not is_awq and f"{module}.g_idx" in self._names):
            yield "g_idx", (self.num_inputs,)

    def _slot(self, part: _Part, kind: str, shape: tuple[int, ...]) -> Slot:
        """Returns the slot of one tensor. Scales are read as float32, which represents every dtype they may have."""
        dtype = torch.float32 if kind == "scales" else torch.int32
        opened = partial(torch.empty, shape, dtype=dtype, device=self._device)
        if kind == "g_idx":
            return Slot(shape, opened, partial(self._keep_groups, part), integers=True)
        return Slot(shape, opened, partial(part.tensors.__setitem__, kind), integers=kind != "scales")

    def _keep_groups(self, part: _Part, group_of_input: Tensor) -> None:
        """Keeps the groups of the inputs unless they are in their natural order, which needs no index. Raises
        ValueError if they do not fit the scales."""
        num_groups = self.num_inputs // self.group_size
        lowest, highest = int(group_of_input.min()), int(group_of_input.max())
        if lowest < 0 or highest >= num_groups:
            raise ValueError(f"its groups are {lowest} to {highest}, but there are scales for 0 to {num_groups - 1}")
        sizes = torch.bincount(group_of_input, minlength=num_groups)
        if bool((sizes != self.group_size).any()):
            group = int((sizes != self.group_size).nonzero()[0])
            raise ValueError(f"group {group} has {int(sizes[group])} inputs instead of {self.group_size}")
        natural = torch.arange(self.num_inputs, device=group_of_input.device) // self.group_size
        if not torch.equal(group_of_input.long(), natural):
            part.tensors["g_idx"] = group_of_input

    def _check_sizes(self, prefix: str) -> None:
        per_word = 32 // self.quantization.bits
        for part in self._parts:
            sizes = f"{self.num_inputs} inputs and {part.num_outputs} outputs of {prefix}{part.name}"
            if self.num_inputs % self.group_size:
                raise ModelLoadError(
                    f"config.json: quantization_config.group_size: {self.group_size} does not divide the {sizes}"
                )
            if self.num_inputs % per_word or part.num_outputs % per_word:
                raise ModelLoadError(
                    f"config.json: quantization_config.bits: {per_word} codes, which share an int32, do not divide the "
                    f"{sizes}"
                )


def layer_weight(
    tensors: dict[str, Tensor], quantization: CheckpointQuantization, num_inputs: int
) -> PrequantizedWeight:
    """Returns the weight of one layer of the checkpoint. `tensors` are by the last word of their names."""
    part = _Part("", tensors["scales"].shape[1], tensors)
    return _join([part], quantization, quantization.group_size or num_inputs)


def _joinable(parts: Sequence[_Part]) -> Iterator[list[_Part]]:
    """Yields runs of neighbouring parts whose inputs are grouped alike."""

    def key(part: _Part) -> bytes | None:
        index = part.tensors.get("g_idx")
        return None if index is None else index.cpu().numpy().tobytes()

    for _, run in groupby(parts, key):
        yield list(run)


def _join(parts: Sequence[_Part], quantization: CheckpointQuantization, group_size: int) -> PrequantizedWeight:
    """Returns the weight of several parts side by side. The parts lose their tensors."""

    def take(kind: str) -> Tensor:
        """Joins one kind of tensor along the outputs, which are the columns of every kind."""
        tensors = [part.tensors.pop(kind) for part in parts]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=1)

    for part in parts:
        if "qzeros" not in part.tensors:
            shape = (part.tensors["scales"].shape[0], part.num_outputs // 8)
            part.tensors["qzeros"] = part.tensors["qweight"].new_full(shape, _MIDDLE_ZEROS)
    scales = take("scales")
    if scales.device.type != "cpu" and torch.equal(scales.half().float(), scales):
        scales = scales.half()  # nearly all are stored so; half the bytes, and exact
    return PrequantizedWeight(
        format=quantization.format,
        codes=take("qweight"),
        zeros=take("qzeros"),
        scales=scales,
        group_size=group_size,
        group_of_input=parts[0].tensors.get("g_idx"),
        bits=quantization.bits,
    )
