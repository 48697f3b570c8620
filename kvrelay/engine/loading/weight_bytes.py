"""The memory that the weights of a model take on a CPU, before any of it is taken.

Invariant: what is counted is written to while the model is loaded, all of it. So a model that is refused could not have
been loaded, and would have ended this process or another one.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path

import torch
from paged_kernels.cpu.weight_memory import WeightMemory
from torch import Tensor

from kvrelay.core.errors import ConfigurationError
from kvrelay.core.process.cgroup import most_memory
from kvrelay.engine.layers.weight_format import Slot, WeightFormat
from kvrelay.engine.out_of_memory import is_refused_by_system


class CountedMemory(WeightMemory):
    """Memory that is only counted: its tensors have shapes and no values. `num_bytes` is how much has been taken."""

    is_filled = True

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def take(self, num_bytes: int) -> Tensor:
        self.num_bytes += num_bytes
        return torch.empty(num_bytes, dtype=torch.uint8, device="meta")


def weight_bytes(memory: CountedMemory, slots: Mapping[str, Slot]) -> int:
    """Returns the bytes of a model's weights at least. `memory` is where they are planned. The codes of a checkpoint
    that is quantised already take theirs when they are read, before they are repacked."""
    codes = sum(prod(slot.shape) for slot in slots.values() if slot.integers)
    return memory.num_bytes + codes * torch.int32.itemsize


@contextmanager
def refusing_weights_that_do_not_fit(num_bytes: int, weights: WeightFormat, directory: Path) -> Iterator[None]:
    """Raises ConfigurationError, at once, if so many bytes are more than this process can have, or if the system
    refuses them within the context. Weights on a GPU, and those that are there already, are not looked at."""
    if weights.device.type != "cpu":
        yield
        return
    needed = f"the weights of {directory} take {num_bytes / 1e9:.1f} GB as {_form(weights)}"
    most = most_memory()
    if num_bytes > most and not weights.memory.is_filled:
        raise ConfigurationError(
            f"{needed}, but of the memory of this machine or container at most {most / 1e9:.1f} GB can be had: "
            f"{_remedy(weights)}, or end what else takes memory"
        )
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if not is_refused_by_system(error):
            raise
        first_line = str(error).partition("\n")[0]
        raise ConfigurationError(
            f"{needed}, which the system refuses: {_remedy(weights)}, or raise the limits on this process (ulimit -v, "
            f"vm.overcommit_memory) ({first_line})"
        ) from error


def _form(weights: WeightFormat) -> str:
    form = str(weights.dtype).removeprefix("torch.")
    if weights.prequantized is not None:
        return f"{weights.prequantized.quantization} and {form}"
    return form if weights.bits is None else f"int{weights.bits} and {form}"


def _remedy(weights: WeightFormat) -> str:
    smaller = list[str]()
    if weights.dtype is torch.float32:
        smaller.append("dtype to bfloat16")
    if weights.bits is None and weights.prequantized is None:
        smaller.append("quantization to int8 or int4")
    return f"set {' or '.join(smaller)}, or take a smaller model" if smaller else "take a smaller model"
