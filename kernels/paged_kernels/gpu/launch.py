"""A kernel launch as a value: what would be launched can also be compiled ahead of time, or counted.

Invariant: planning a launch reads shapes, strides and dtypes only; it never waits for the device.
"""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

Argument = Tensor | int | float | None


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One launch. `arguments` are the kernel's run-time parameters in their order, `constants` its compile-time
    ones."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Argument]
    constants: Mapping[str, int | bool]
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True, slots=True)
class GpuTraits:
    """What launch parameters depend on. `shared_bytes` is what one thread block may use, `converts_fp8` whether there
    are instructions that convert e4m3."""

    num_sms: int
    shared_bytes: int
    converts_fp8: bool = False

    @property
    def is_sm_90_or_later(self) -> bool:
        """Returns whether the GPU has the shared memory that came with sm_90 and `wgmma`."""
        return self.shared_bytes >= 200 << 10


def launch(calls: Iterable[KernelCall]) -> None:
    """Enqueues the calls on the current stream of the current device, on which all tensors must be."""
    for call in calls:
        if all(call.grid):
            options = {"num_warps": call.num_warps, "num_stages": call.num_stages}
            call.kernel[call.grid](**call.arguments, **call.constants, **options)


@functools.cache
def traits_of(device: torch.device) -> GpuTraits:
    """Returns the traits of a CUDA or ROCm device; for the CPU, where only the interpreter runs, of no GPU in
    particular."""
    if device.type != "cuda":
        return GpuTraits(num_sms=4, shared_bytes=64 << 10)
    properties = torch.cuda.get_device_properties(device)
    shared_bytes = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    converts_fp8 = torch.version.hip is None and (properties.major, properties.minor) >= (8, 9)
    return GpuTraits(properties.multi_processor_count, shared_bytes, converts_fp8)


def widen_products(dtype: torch.dtype) -> bool:
    """Returns whether matrix products must be widened to float32: for bfloat16 in Triton's interpreter, which gets it
    wrong."""
    return dtype == torch.bfloat16 and bool(triton.knobs.runtime.interpret)


def next_power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def ceil_divide(count: int, divisor: int) -> int:
    return -(-count // divisor)
