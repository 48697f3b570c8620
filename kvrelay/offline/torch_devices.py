"""Torch's default and current devices, and its autocast, which a program may choose, while the engine computes."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


@contextmanager
def devices_set_for(device: torch.device) -> Iterator[None]:
    """A context in which torch makes tensors on the host where no device is named, in which the GPU `device`, if it is
    one, is the current one (kernels are launched there, whatever their tensors are on), and in which operations on
    `device` compute in the dtypes of their tensors."""
    current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with _host_by_default(), current, _no_autocast(device):
        yield


def _host_by_default() -> AbstractContextManager[object]:
    """Returns a context in which the host is the default (`torch.set_default_device`). Where the program has chosen
    nothing, the context does nothing: one of torch's would slow down each of its calls."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


def _no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Returns a context in which `torch.autocast` is off for the type of `device`. Otherwise it would give some
    operations other dtypes than kvrelay has chosen for them."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()
