"""A pool in a GPU's memory, with what reaches it there. Needs a GPU and Triton; imported where there is one."""

import torch
from paged_kernels.gpu.digest import BlockDigests

from kv_connector.device.cuda_memory import CudaMemory
from kvrelay.core.errors import ConfigurationError
from kvrelay.core.kv.layout import KVLayout
from kvrelay.engine.kv_pool import allocate_pool


def direct_memory(pool: torch.Tensor) -> CudaMemory:
    """Returns the node's own pool for transports. Raises ConfigurationError when its blocks cannot be digested on the
    GPU."""
    try:
        return CudaMemory(pool, BlockDigests)
    except ValueError as error:
        raise ConfigurationError(f"--kv-device-transfer: {error}; set it to staged") from error


def cuda_scratch(layout: KVLayout, num_blocks: int) -> CudaMemory:
    """Returns a zeroed pool for a self-test on GPU 0."""
    return direct_memory(allocate_pool(layout, num_blocks, torch.device("cuda", 0)))


def problem_with_direct() -> str:
    """Returns why memory of this machine's GPUs cannot be reached directly; empty when that may be possible."""
    return "" if torch.version.hip is None else "neither UCX as packaged nor CUDA IPC is for ROCm"
