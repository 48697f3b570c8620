"""One kernel on one shape: how it runs, what is right, and what work is unavoidable."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bench.gpu.measure import Rates, Stopwatch
from bench.gpu.report import Result

# Allowed deviation from float64: relative, and as a share of the largest value.
TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2**-6, 2**-7), torch.float16: (2**-9, 2**-10)}


@dataclass(frozen=True, slots=True)
class Case:
    """`run` returns the result in the kernel's dtype, `expected` in float64 (or integers, which must be equal).
    `num_bytes` are read and written at least, `num_flops` computed. `peers`: the same work by others."""

    name: str
    run: Callable[[], Tensor]
    expected: Callable[[], Tensor]
    num_bytes: float
    num_flops: float = 0.0
    peers: Mapping[str, Callable[[], object]] = field(default_factory=dict)

    def measure(self, watch: Stopwatch, rates: Rates) -> Result:
        error = deviation(self.run(), self.expected())
        seconds = watch.seconds(self.run)
        peers = {name: watch.seconds(run) for name, run in self.peers.items()}
        return Result(self.name, error, seconds, rates.floor_seconds(self.num_bytes, self.num_flops), peers)


def deviation(actual: Tensor, expected: Tensor) -> float:
    """The largest error as a share of the allowed one; infinite for a NaN or an unequal integer."""
    if not actual.is_floating_point():
        return 0.0 if torch.equal(actual.cpu(), expected.cpu()) else float("inf")
    relative, absolute = TOLERANCE[actual.dtype]
    allowed = relative * expected.abs() + absolute * expected.abs().max()
    worst = float(((actual.double() - expected).abs() / allowed.clamp_min(1e-300)).max())
    return worst if worst == worst else float("inf")
