"""One kernel on one shape: how it runs, what is right, and what work is unavoidable."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from bench.gpu.measure import Rates, Stopwatch, poisoned
from bench.gpu.report import Result
from bench.gpu.task import attempt

# Allowed deviation from float64: relative, and as a share of the largest value.
TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2**-6, 2**-7), torch.float16: (2**-9, 2**-10)}


@dataclass(frozen=True, slots=True)
class Case:
    """`run` returns the result in the kernel's dtype, `expected` in float64 (or integers, which must be equal).
    `timed` does the work alone where `run` also prepares it or reads it back. `num_bytes` are read and written at
    least, `num_flops` computed. `peers`: the same work by others. `tolerance`: as TOLERANCE's, where that of the dtype
    does not fit."""

    name: str
    run: Callable[[], Tensor]
    expected: Callable[[], Tensor]
    num_bytes: float
    num_flops: float = 0.0
    peers: Mapping[str, Callable[[], object]] = field(default_factory=dict)
    tolerance: tuple[float, float] | None = None
    timed: Callable[[], object] | None = None

    def measure(self, watch: Stopwatch, rates: Rates) -> Result:
        """Compared before and after it was timed: what changes from run to run is a race."""
        expected = self.expected()
        with poisoned():
            error = deviation(self.run(), expected, self.tolerance)
        seconds = watch.seconds(self.timed or self.run)
        with poisoned():
            error = max(error, deviation(self.run(), expected, self.tolerance))
        del expected
        peers = attempt({name: partial(watch.seconds, run) for name, run in self.peers.items()})
        return Result(self.name, error, seconds, rates.floor_seconds(self.num_bytes, self.num_flops), peers)


def deviation(actual: Tensor, expected: Tensor, tolerance: tuple[float, float] | None = None) -> float:
    """The largest error as a share of the allowed one; infinite for a NaN or an unequal integer."""
    if not actual.is_floating_point():
        return 0.0 if torch.equal(actual.cpu(), expected.cpu()) else float("inf")
    relative, absolute = tolerance or TOLERANCE[actual.dtype]
    allowed = relative * expected.abs() + absolute * expected.abs().max()
    worst = float(((actual.double() - expected).abs() / allowed.clamp_min(1e-300)).max())
    return worst if worst == worst else float("inf")
