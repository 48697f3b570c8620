"""Times work on a GPU, and measures in the same run the two rates that every floor is computed from.

A time is the median over repeats between CUDA events. Before each repeat the caches are flushed with so much memory
that the host has enqueued the work before the GPU gets to it, so that only the GPU is timed; repeats in which the host
was late do not count. On the CPU, where nothing but this code is tested, wall time serves.
"""

import logging
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from bench.timing import wall_seconds

_logger = logging.getLogger(__name__)
_FLUSH_BYTES = 2 << 30  # many times the L2 cache of any GPU, and half a millisecond of writing


@dataclass(frozen=True, slots=True)
class Rates:
    """What a GPU can do at most. `copy` is bytes read plus bytes written per second, `matmul` operations per second in
    the suite's dtype."""

    copy: float
    matmul: float

    def floor_seconds(self, num_bytes: float, num_flops: float) -> float:
        return max(num_bytes / self.copy, num_flops / self.matmul)


@dataclass(frozen=True, slots=True)
class Repeat:
    """One run between two events on the GPU."""

    begin: torch.cuda.Event
    end: torch.cuda.Event
    host_was_ahead: bool  # everything was enqueued before the GPU began

    @property
    def milliseconds(self) -> float:
        return float(self.begin.elapsed_time(self.end))


@dataclass(frozen=True, slots=True)
class Stopwatch:
    device: torch.device
    repeats: int

    def seconds(self, run: Callable[[], object]) -> float:
        """Returns the median time of one `run`. On a GPU the first calls, which compile, do not count."""
        if self.device.type != "cuda":
            return statistics.median(wall_seconds(run) for _ in range(self.repeats))
        for _ in range(3):
            run()
        flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=self.device)
        torch.cuda.synchronize(self.device)
        timed = [self._timed(run, flush) for _ in range(self.repeats)]
        torch.cuda.synchronize(self.device)
        return statistics.median(repeat.milliseconds for repeat in unaffected(timed)) / 1e3

    def _timed(self, run: Callable[[], object], flush: torch.Tensor) -> Repeat:
        begin, end = _event(), _event()
        flush.zero_()
        begin.record()
        run()
        end.record()
        return Repeat(begin, end, host_was_ahead=not begin.query())  # type: ignore[no-untyped-call]


def unaffected(repeats: Sequence[Repeat]) -> Sequence[Repeat]:
    """Returns the repeats in which the GPU did not wait for the host, or all, if it always did."""
    found = [repeat for repeat in repeats if repeat.host_was_ahead]
    if not found:
        _logger.warning("the GPU waited for the host: what was measured includes launching")
    return found or repeats


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def measure_rates(watch: Stopwatch, *, copy_bytes: int, matmul_size: int, dtype: torch.dtype) -> Rates:
    """Measures both rates with random data, since zeros are copied and multiplied faster."""
    source = torch.randint(0, 256, (copy_bytes,), dtype=torch.uint8, device=watch.device)
    target = torch.empty_like(source)
    copy = 2 * copy_bytes / watch.seconds(lambda: target.copy_(source))
    a = torch.randn(matmul_size, matmul_size, device=watch.device).to(dtype)
    matmul = 2 * matmul_size**3 / watch.seconds(lambda: a @ a)
    return Rates(copy, matmul)


@contextmanager
def poisoned() -> Iterator[None]:
    """Makes `torch.empty` return NaN or the largest integer, so that an element that nobody writes is noticed."""
    was_on = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on)


@contextmanager
def never_waiting(device: torch.device) -> Iterator[None]:
    """Makes torch raise RuntimeError wherever the host would wait for a GPU. On a CPU nothing changes."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
