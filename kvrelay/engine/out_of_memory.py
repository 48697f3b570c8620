"""What is raised where a card is full, and what a person is told then."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvrelay.core.errors import ConfigurationError, KVRelayError

# Of the driver, when torch has no allocator yet; of Triton, which loads kernels; of cuBLAS, which allocates by itself.
_OTHERS = (
    *("CUDA error: out of memory", "HIP error: out of memory"),
    *("Triton Error [CUDA]: out of memory", "Triton Error [HIP]: out of memory"),
    "BLAS_STATUS_ALLOC_FAILED",
)


class GpuMemoryError(KVRelayError):
    """A step needs more memory than the card has left."""


def is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in _OTHERS)


@contextmanager
def out_of_memory_as_configuration_error(message: str) -> Iterator[None]:
    """Raises ConfigurationError with `message` where a card is full within the context."""
    try:
        yield
    except (RuntimeError, GpuMemoryError) as error:
        if isinstance(error, RuntimeError) and not is_out_of_memory(error):
            raise
        first_line = str(error).partition("\n")[0]
        raise ConfigurationError(f"{message} ({first_line})") from error
