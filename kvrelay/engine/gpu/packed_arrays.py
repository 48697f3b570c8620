"""Many small arrays packed into one range of bytes, so that one copy brings them to a GPU.

Invariant: every array begins at a multiple of 16 bytes. Triton assumes that of a pointer it has once seen aligned.
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
    """Arrays with their offsets in the packed bytes. An offset depends only on the sizes of the arrays before it."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self._arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        self._offsets: dict[str, int] = {}
        self.num_bytes = 0
        for name, array in self._arrays.items():
            self._offsets[name] = self.num_bytes
            self.num_bytes += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT

    def to(self, target: Tensor) -> None:
        """Enqueues the copy of all arrays to the beginning of `target`, which is uint8 on any device."""
        staging = torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=target.is_cuda)
        memory = staging.numpy()
        for name, array in self._arrays.items():
            offset = self._offsets[name]
            memory[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
        target[: self.num_bytes].copy_(staging, non_blocking=True)  # torch keeps pinned memory until the copy is done

    def views(self, target: Tensor) -> dict[str, Tensor]:
        """Returns the arrays as views of `target`."""
        found = {}
        for name, array in self._arrays.items():
            offset = self._offsets[name]
            flat = target[offset : offset + array.nbytes].view(_TORCH_DTYPES[array.dtype])
            found[name] = flat.view(array.shape)
        return found


def to_host(tensor: Tensor) -> Tensor:
    """Returns a copy in host memory, valid once the work enqueued so far has ended."""
    if not tensor.is_cuda:
        return tensor.clone()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)
