"""Recognises the errors that are raised when memory is full, and turns them into advice for the operator."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvrelay.core.errors import ConfigurationError, KVRelayError

# Messages of the driver before torch has an allocator, of Triton when it loads kernels, and of cuBLAS.
_OTHERS = (
    *("CUDA error: out of memory", "HIP error: out of memory"),
    *("Triton Error [CUDA]: out of memory", "Triton Error [HIP]: out of memory"),
    "BLAS_STATUS_ALLOC_FAILED",
)


class GpuMemoryError(KVRelayError):
    """A step needs more memory than the GPU has left."""


def is_out_of_memory(error: RuntimeError) -> bool:
    """Tells whether an error means that a GPU's memory is full."""
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in _OTHERS)


def is_refused_by_system(error: Exception) -> bool:
    """Tells whether an error means that the system refuses memory of its own, as under a limit on addresses."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)


@contextmanager
def out_of_memory_as_configuration_error(message: str) -> Iterator[None]:
    """Raises ConfigurationError with `message` if a GPU's memory turns out to be full within the context."""
    try:
        yield
    except (RuntimeError, GpuMemoryError) as error:
        if isinstance(error, RuntimeError) and not is_out_of_memory(error):
            raise
        first_line = str(error).partition("\n")[0]
        raise ConfigurationError(f"{message} ({first_line})") from error
