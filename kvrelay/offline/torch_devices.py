"""Torch's default and current devices, which a program may choose, while the engine computes."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


@contextmanager
def devices_set_for(device: torch.device) -> Iterator[None]:
    """A context in which torch makes tensors on the host where no device is named, and in which the GPU `device`, if it
    is one, is the current one: kernels are launched there, whatever their tensors are on."""
    current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with _host_by_default(), current:
        yield


def _host_by_default() -> AbstractContextManager[object]:
    """Returns a context in which the host is the default (`torch.set_default_device`). Where the program has chosen
    nothing, the context does nothing: one of torch's would slow down each of its calls."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
