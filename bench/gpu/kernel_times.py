"""The time of a step on the GPU, kernel by kernel, as torch's profiler sees it."""

import logging
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

_logger = logging.getLogger(__name__)
_MOST = 12  # kernels that are named; the others are one sum
_NAME_LENGTH = 48


def time_by_kernel(step: Callable[[], object], steps: int) -> dict[str, float]:
    """Runs `step` `steps` times and returns the seconds of each kernel in one step, the longest first. Returns nothing
    where the profiler does not work, which is no reason to lose a measurement."""
    try:
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            for _ in range(steps):
                step()
            torch.cuda.synchronize()
    except Exception as error:  # the profiler raises errors of many kinds
        _logger.warning("no times by kernel: %s", error)
        return {}
    seconds: dict[str, float] = {}
    for event in profiler.events() or ():
        if event.device_type.name == "CUDA":
            name = event.name[:_NAME_LENGTH]
            seconds[name] = seconds.get(name, 0.0) + event.time_range.elapsed_us() / 1e6 / steps
    longest = sorted(seconds.items(), key=lambda item: -item[1])
    shown = dict(longest[:_MOST])
    if len(longest) > _MOST:
        shown["all others"] = sum(value for _, value in longest[_MOST:])
    return shown
