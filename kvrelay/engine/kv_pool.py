"""The tensor of the KV pool, `[num_blocks, *layout.block_shape]`, in given memory or in newly allocated memory.

Invariant: its dtype is the layout's, whichever dtype the model computes in.
"""

import numpy as np
import torch
from torch import Tensor

from kvrelay.core.kv.layout import KVLayout
from kvrelay.core.process.private_memory import map_private_memory
from kvrelay.engine.out_of_memory import out_of_memory_as_configuration_error

_CPU = torch.device("cpu")


def pool_dtype(layout: KVLayout) -> torch.dtype:
    dtype = getattr(torch, layout.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def pool_over(memory: memoryview, layout: KVLayout, num_blocks: int) -> Tensor:
    """Returns the pool as a view of `memory`: host memory of `num_blocks * layout.block_bytes` bytes that is writable
    and zeroed. It cannot be unmapped (BufferError) as long as the tensor lives, in which a step may still compute."""
    rows = np.frombuffer(memory, np.uint8)  # torch.frombuffer would give the buffer back at once
    return torch.from_numpy(rows).view(pool_dtype(layout)).view(num_blocks, *layout.block_shape)


def allocate_pool(layout: KVLayout, num_blocks: int, device: torch.device = _CPU) -> Tensor:
    """Returns a pool in newly allocated, zeroed memory. In host memory, the kernel zeroes each page at its first use,
    and a forked process has a copy of its own. Raises ConfigurationError if there is too little memory."""
    if device.type == "cpu":
        return pool_over(memoryview(map_private_memory(layout, num_blocks)), layout, num_blocks)
    with out_of_memory_as_configuration_error(
        f"{device} has no room for {num_blocks} KV blocks ({num_blocks * layout.block_bytes / 2**30:.1f} GiB): end "
        "what else uses the GPU, or lower gpu_memory_utilization or num_blocks"
    ):
        return torch.zeros(num_blocks, *layout.block_shape, dtype=pool_dtype(layout), device=device)
