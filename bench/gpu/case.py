"""One kernel on one shape: how to run it, its right result, and the work that cannot be avoided."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from bench.gpu.measure import Rates, Stopwatch, poisoned
from bench.gpu.report import Result
from bench.gpu.task import Task, attempt

# Allowed deviation from float64: relative, and as a share of the largest value.
TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2**-6, 2**-7), torch.float16: (2**-9, 2**-10)}


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel to be checked and timed.

    `run` returns the result in the kernel's dtype, `expected` in float64 (or as integers, which must be equal). `timed`
    does only the work itself, for cases whose `run` also prepares it or reads it back. The work reads and writes at
    least `num_bytes` and computes `num_flops`. `peers` are other implementations of the same work. `tolerance` replaces
    TOLERANCE's entry for the dtype.
    """

    run: Callable[[], Tensor]
    expected: Callable[[], Tensor]
    num_bytes: float
    num_flops: float = 0.0
    peers: Mapping[str, Callable[[], object]] = field(default_factory=dict)
    tolerance: tuple[float, float] | None = None
    timed: Callable[[], object] | None = None

    def measure(self, name: str, watch: Stopwatch, rates: Rates) -> Result:
        """Compares the result before and after the timing, so that a race, which changes results, is noticed."""
        expected = self.expected()
        with poisoned():
            error = deviation(self.run(), expected, self.tolerance)
        seconds = watch.seconds(self.timed or self.run)
        with poisoned():
            error = max(error, deviation(self.run(), expected, self.tolerance))
        del expected
        peers = attempt({name: partial(watch.seconds, run) for name, run in self.peers.items()})
        return Result(name, error, seconds, rates.floor_seconds(self.num_bytes, self.num_flops), peers)


def case_task(name: str, make: Callable[[], Case], watch: Stopwatch, rates: Rates) -> Task:
    """Returns the measurement of a case, which is made when its turn comes: its tensors fill much of the GPU."""
    return Task(name, lambda: make().measure(name, watch, rates))


def deviation(actual: Tensor, expected: Tensor, tolerance: tuple[float, float] | None = None) -> float:
    """Returns the largest error as a share of the allowed one. It is infinite for a NaN or an unequal integer."""
    if not actual.is_floating_point():
        return 0.0 if torch.equal(actual.cpu(), expected.cpu()) else float("inf")
    relative, absolute = tolerance or TOLERANCE[actual.dtype]
    allowed = relative * expected.abs() + absolute * expected.abs().max()
    worst = float(((actual.double() - expected).abs() / allowed.clamp_min(1e-300)).max())
    return worst if worst == worst else float("inf")
