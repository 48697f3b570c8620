"""Service level objectives: limits that one request meets or not."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.bench.base import RequestRecord

METRICS = ("ttft", "itl", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class Slos:
    """Limits in seconds by metric. `itl` limits the longest gap of a request, `tpot` its mean."""

    limits: tuple[tuple[str, float], ...]

    @classmethod
    def parse(cls, texts: Sequence[str]) -> "Slos | None":
        """`ttft=500` and so on, milliseconds; None of nothing. Raises ValueError."""
        limits: dict[str, float] = {}
        for text in texts:
            metric, equals, value = text.partition("=")
            try:
                limit = float(value)
            except ValueError:
                limit = 0.0
            if metric not in METRICS or not equals or limit <= 0:
                raise ValueError(f"{text!r} is no SLO; write METRIC=MILLISECONDS with one of {', '.join(METRICS)}")
            limits[metric] = limit / 1e3
        return cls(tuple(limits.items())) if limits else None

    def met_by(self, record: RequestRecord) -> bool:
        """A request that failed meets none."""
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
