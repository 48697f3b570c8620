"""Many small arrays in one run of bytes, so that they reach a device in one copy.

Invariant: every array begins at a multiple of 16 bytes, which is what Triton assumes of a pointer it has seen aligned.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from kvrelay.engine.step_inputs import Array

_ALIGNMENT = 16
_TORCH_DTYPES = {
    np.dtype(np.bool_): torch.bool,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.uint64): torch.int64,  # the same bits
}


class PackedArrays:
    """Where each array lies depends on the shapes of those before it only."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self._arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        self._offsets: dict[str, int] = {}
        self.num_bytes = 0
        for name, array in self._arrays.items():
            self._offsets[name] = self.num_bytes
            self.num_bytes += -(-max(1, array.nbytes) // _ALIGNMENT) * _ALIGNMENT

    def to(self, target: Tensor) -> None:
        """Enqueues the copy into the beginning of `target`, uint8 on any device."""
        staging = torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=target.is_cuda)
        memory = staging.numpy()
        for name, array in self._arrays.items():
            offset = self._offsets[name]
            memory[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
        target[: self.num_bytes].copy_(staging, non_blocking=True)  # torch keeps pinned memory until the copy is done

    def views(self, target: Tensor) -> dict[str, Tensor]:
        """The arrays in `target`."""
        found = {}
        for name, array in self._arrays.items():
            offset = self._offsets[name]
            flat = target[offset : offset + array.nbytes].view(_TORCH_DTYPES[array.dtype])
            found[name] = flat.view(array.shape)
        return found


def to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, there once the work enqueued before it is done."""
    if not tensor.is_cuda:
        return tensor.clone()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)
