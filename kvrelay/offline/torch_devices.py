"""Where torch makes a tensor for which no device is named: for the engine that is the host."""

from contextlib import AbstractContextManager, nullcontext

import torch


def host_by_default() -> AbstractContextManager[object]:
    """Returns a context in which that is the host, whatever the program has chosen (`torch.set_default_device`). Where
    it has chosen nothing, the context does nothing: one of torch's would slow down each of its calls."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
