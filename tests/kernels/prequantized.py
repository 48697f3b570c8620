"""Layers in AWQ's and GPTQ's published layouts, packed from known codes, and what they mean: plain numpy, after the
formats' descriptions, and nothing of what is tested."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from paged_kernels.prequantized_weight import PrequantizedFormat, PrequantizedWeight
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of an int32 holds column AWQ_ORDER[i] of its eight
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Layer:
    """A quantised layer before it is packed. `codes`: `[num_inputs, num_outputs]`, `zeros` and `scales`: `[num_groups,
    num_outputs]`."""

    format: PrequantizedFormat
    bits: int
    codes: Integers
    zeros: Integers
    scales: npt.NDArray[np.float16]
    group_of_input: Integers

    def dequantized(self) -> Tensor:
        """`[num_outputs, num_inputs]` float32: exact, for a scale has 11 significant bits and a difference 9."""
        steps = (self.codes - self.zeros[self.group_of_input]).astype(np.float32)
        return torch.from_numpy((steps * self.scales[self.group_of_input].astype(np.float32)).T.copy())

    def tensors(self) -> dict[str, Tensor]:
        """As a checkpoint has them, without `g_idx`."""
        if self.format is PrequantizedFormat.AWQ:
            codes = pack_columns(self.codes, self.bits, AWQ_ORDER)
            zeros = pack_columns(self.zeros, self.bits, AWQ_ORDER)
        else:
            in_order = tuple(range(32 // self.bits))
            codes = pack_columns(self.codes.T, self.bits, in_order).T
            stored = self.zeros - 1 if self.format is PrequantizedFormat.GPTQ else self.zeros
            zeros = pack_columns(stored, self.bits, in_order)
        return {
            "qweight": torch.from_numpy(codes.copy()),
            "qzeros": torch.from_numpy(zeros.copy()),
            "scales": torch.from_numpy(self.scales.copy()),
        }

    def group_index(self) -> Tensor:
        return torch.from_numpy(self.group_of_input.astype(np.int32))

    def weight(self, group_size: int, *, shuffled: bool = False) -> PrequantizedWeight:
        tensors = self.tensors()
        return PrequantizedWeight(
            self.format,
            tensors["qweight"],
            tensors["qzeros"],
            tensors["scales"],
            group_size,
            self.group_index() if shuffled else None,
            4 if self.bits == 4 else 8,
        )


def random_layer(
    form: PrequantizedFormat,
    num_inputs: int,
    num_outputs: int,
    group_size: int,
    *,
    bits: int = 4,
    symmetric: bool = False,
    order_seed: int | None = None,
    seed: int = 0,
    spread: float = 0.2,
) -> Layer:
    """Weights around zero with about the given standard deviation. `order_seed` scatters the groups (`desc_act`)."""
    generator = np.random.default_rng(seed)
    num_groups, top = num_inputs // group_size, 2**bits
    codes = generator.integers(0, top, (num_inputs, num_outputs))
    zeros = generator.integers(top * 3 // 8, top * 5 // 8, (num_groups, num_outputs))
    if symmetric:
        zeros = np.full_like(zeros, top // 2)
    else:
        lowest = 1 if form is PrequantizedFormat.GPTQ else 0
        zeros[0, :2] = lowest, (top if form is PrequantizedFormat.GPTQ else top - 1)  # the ends of what can be stored
    step = spread / (top**2 / 12) ** 0.5
    scales = generator.uniform(0.7 * step, 1.3 * step, (num_groups, num_outputs)).astype(np.float16)
    groups = np.arange(num_inputs) // group_size
    if order_seed is not None:
        groups = np.random.default_rng(order_seed).permutation(groups)
    return Layer(form, bits, codes, zeros, scales, groups)


def pack_columns(values: Integers, bits: int, order: tuple[int, ...]) -> npt.NDArray[np.int32]:
    """`[rows, columns]` to `[rows, columns / (32 / bits)]`."""
    words = np.zeros((values.shape[0], values.shape[1] // len(order)), dtype=np.uint32)
    for place, column in enumerate(order):
        words |= values[:, column :: len(order)].astype(np.uint32) << np.uint32(bits * place)
    return words.view(np.int32)
