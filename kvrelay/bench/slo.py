"""Service level objectives: limits that a request meets or not."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.bench.base import RequestRecord

METRICS = ("ttft", "itl", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class Slos:
    """Limits in seconds by metric. `itl` limits the longest gap of a request, `tpot` the mean of its gaps; one without
    gaps meets both, as in vLLM's benchmark."""

    limits: tuple[tuple[str, float], ...]

    @classmethod
    def parse(cls, texts: Sequence[str]) -> "Slos | None":
        """Parses texts such as `ttft=500`, in milliseconds. Returns None without any. Raises ValueError."""
        limits: dict[str, float] = {}
        for text in texts:
            metric, equals, value = text.partition("=")
            try:
                limit = float(value)
            except ValueError:
                limit = 0.0
            if metric not in METRICS or not equals or not 0 < limit < math.inf:
                raise ValueError(f"{text!r} is no SLO; write METRIC=MILLISECONDS with one of {', '.join(METRICS)}")
            limits[metric] = limit / 1e3
        return cls(tuple(limits.items())) if limits else None

    def met_by(self, record: RequestRecord) -> bool:
        """Tells whether the request meets every limit; one that failed does not."""
        if record.failure is not None:
            return False
        measured = {
            "ttft": record.ttft,
            "itl": max(record.itls, default=0.0),
            "tpot": record.tpot or 0.0,
            "e2e": record.e2e,
        }
        return all(measured[metric] <= limit for metric, limit in self.limits)

    def __str__(self) -> str:
        return ", ".join(f"{metric} <= {limit * 1e3:g} ms" for metric, limit in self.limits)
