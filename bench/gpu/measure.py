"""Times work on a GPU and measures the two rates that every floor is made of, in the same run.

A time is the median over repeats between CUDA events. Before each the caches are flushed with so much memory that the
host has enqueued the work before the card comes to it: what is timed is the card. On the CPU, where only the plumbing
is tested, the clock of the process serves.
"""

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from bench.timing import wall_seconds

_FLUSH_BYTES = 2 << 30  # many times the L2 cache of any card, and half a millisecond of writing


@dataclass(frozen=True, slots=True)
class Rates:
    """`copy`: bytes read plus bytes written a second; `matmul`: operations a second in the dtype of the suite."""

    copy: float
    matmul: float

    def floor_seconds(self, num_bytes: float, num_flops: float) -> float:
        return max(num_bytes / self.copy, num_flops / self.matmul)


@dataclass(frozen=True, slots=True)
class Stopwatch:
    device: torch.device
    repeats: int

    def seconds(self, run: Callable[[], object]) -> float:
        """Of one `run`; the first calls, which compile, do not count."""
        for _ in range(3 if self.device.type == "cuda" else 1):
            run()
        if self.device.type != "cuda":
            return statistics.median(wall_seconds(run) for _ in range(self.repeats))
        flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=self.device)
        torch.cuda.synchronize(self.device)
        begins = [_event() for _ in range(self.repeats)]
        ends = [_event() for _ in range(self.repeats)]
        for begin, end in zip(begins, ends, strict=True):
            flush.zero_()
            begin.record()
            run()
            end.record()
        torch.cuda.synchronize(self.device)
        milliseconds = [float(begin.elapsed_time(end)) for begin, end in zip(begins, ends, strict=True)]
        return statistics.median(milliseconds) / 1e3


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def measure_rates(watch: Stopwatch, *, copy_bytes: int, matmul_size: int, dtype: torch.dtype) -> Rates:
    """Of random data: zeros are copied and multiplied faster."""
    source = torch.randint(0, 256, (copy_bytes,), dtype=torch.uint8, device=watch.device)
    target = torch.empty_like(source)
    copy = 2 * copy_bytes / watch.seconds(lambda: target.copy_(source))
    a = torch.randn(matmul_size, matmul_size, device=watch.device).to(dtype)
    matmul = 2 * matmul_size**3 / watch.seconds(lambda: a @ a)
    return Rates(copy, matmul)


@contextmanager
def poisoned() -> Iterator[None]:
    """What `torch.empty` gives meanwhile is NaN, or the largest integer: an element that nobody writes is seen."""
    was_on = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on)


@contextmanager
def never_waiting(device: torch.device) -> Iterator[None]:
    """On a card, what makes the host wait for it raises meanwhile."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
