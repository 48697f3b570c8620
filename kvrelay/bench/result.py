"""The result of one run, and the JSON file of all runs of a command."""

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from kvrelay.bench.base import RequestRecord
from kvrelay.bench.offered import Offered
from kvrelay.bench.output_file import errors_naming
from kvrelay.bench.settings import BenchSettings
from kvrelay.bench.summary import Summary

SCHEMA = 1
LATE_SECONDS = 0.1  # what is sent or noticed later than this shows that the client could not keep up


@dataclass(frozen=True, slots=True)
class RunResult:
    """One run: its figures and every measured request.

    `client_cpu_seconds` is the processor time that this process took since the load began, and `client_cpu_share` its
    share of one core: near 1, this client is the limit. `was_cut` tells that a signal ended the run. `num_unsent` are
    the later turns of conversations of which a turn failed. `max_concurrency` limited the requests that ran at a time,
    None: nothing did. `num_at_once` is the number of requests or conversations, if all could have begun at once, and
    `offered` is what arrived, if they came at times of their own. `longest_stall` is the longest time in seconds for
    which this client noticed nothing that arrived.
    """

    label: str
    summary: Summary
    by_kind: dict[str, Summary]
    records: tuple[RequestRecord, ...]
    client_cpu_seconds: float
    client_cpu_share: float = 0.0
    was_cut: bool = False
    num_unsent: int = 0
    max_concurrency: int | None = None
    num_at_once: int | None = None
    offered: Offered | None = None
    longest_stall: float = 0.0

    @property
    def client_cpu_per_token(self) -> float | None:
        """Returns the seconds of processor time that this client took per output token, None if there were none."""
        tokens = self.summary.output_tokens
        return self.client_cpu_seconds / tokens if tokens else None

    @property
    def prompt_growth(self) -> float:
        """Returns the prompt tokens that the server counted over those that were drawn; 1 without any."""
        good = [record for record in self.records if record.failure is None]
        drawn = sum(record.num_drawn_tokens for record in good)
        return sum(record.num_prompt_tokens for record in good) / drawn if drawn else 1.0

    @property
    def tokens_per_piece(self) -> float:
        """Returns how many output tokens a piece held on average, in requests that ended well; 0 without any."""
        good = [record for record in self.records if record.failure is None]
        return sum(record.num_output_tokens for record in good) / max(1, sum(len(record.arrivals) for record in good))

    @property
    def client_was_late(self) -> bool:
        """Tells whether requests were sent later than they could be."""
        return self.summary.latest_start > LATE_SECONDS

    @property
    def limit_was_reached(self) -> bool:
        """Tells whether a request had to wait for its place."""
        return any(record.due > record.scheduled for record in self.records)

    @property
    def was_too_small(self) -> bool:
        """Tells whether as many requests as `max_concurrency` could never run at a time."""
        if self.max_concurrency is None or self.num_at_once is None:
            return False
        return self.num_at_once < self.max_concurrency

    @property
    def longest_wait(self) -> float:
        """Returns how many seconds a request waited for its place at most. Those whose time was the beginning do not
        count: with a limit alone, all of them wait on purpose."""
        return max((record.due - record.scheduled for record in self.records if record.scheduled > 0), default=0.0)

    @property
    def flaws(self) -> tuple[str, ...]:
        """Returns what makes the figures not those of the load that was asked for."""
        found = {
            "cut off": self.was_cut,
            "turns unsent": self.num_unsent > 0,
            "client late": self.client_was_late,
            f"client stalled for {self.longest_stall * 1e3:.0f} ms": self.longest_stall > LATE_SECONDS,
            "too few": self.was_too_small or (self.offered is not None and self.offered.was_too_short),
            "not sustained": self.offered is not None and not self.offered.was_sustained,
        }
        return tuple(name for name, is_true in found.items() if is_true)


def write_results(
    path: Path,
    command: str,
    model: str,
    settings: BenchSettings,
    results: Sequence[RunResult],
    *,
    knee: RunResult | None,
) -> None:
    """Writes settings, environment, figures and the knee's label. Raises ConfigurationError when it cannot."""
    body = {
        "schema": SCHEMA,
        "command": command,
        "model": model,
        "settings": settings.model_dump(mode="json", exclude={"config", "api_key"}),
        "environment": environment(),
        "knee": None if knee is None else knee.label,
        "runs": [_run(result, with_records=settings.save_requests) for result in results],
    }
    with errors_naming("--json-file", path), path.open("w", encoding="utf-8") as file:
        # One piece of text at a time: as a whole, that of all requests would take most of our memory.
        json.dump(body, file, indent=2, allow_nan=False, default=_request)
        file.write("\n")


def environment() -> dict[str, object]:
    """Returns versions, machine and time of the measurement."""
    return {
        "kvrelay": metadata.version("kvrelay") if _is_installed("kvrelay") else "source tree",
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _run(result: RunResult, *, with_records: bool) -> dict[str, object]:
    body: dict[str, object] = {
        "label": result.label,
        "was_cut": result.was_cut,
        "num_unsent": result.num_unsent,
        "flaws": result.flaws,
        "offered": None if result.offered is None else asdict(result.offered),
        "max_concurrency": result.max_concurrency,
        "limit_was_reached": result.limit_was_reached,
        "longest_wait": result.longest_wait,
        "num_at_once": result.num_at_once,
        "prompt_growth": result.prompt_growth,
        "tokens_per_piece": result.tokens_per_piece,
        "client_cpu_seconds": result.client_cpu_seconds,
        "client_cpu_share": result.client_cpu_share,
        "client_longest_stall": result.longest_stall,
        "summary": asdict(result.summary),
        "by_kind": {kind: asdict(summary) for kind, summary in result.by_kind.items()},
    }
    if with_records:
        body["requests"] = result.records
    return body


def _request(record: RequestRecord) -> dict[str, object]:
    """Returns what the JSON file holds of a request, when it is written."""
    return asdict(record) | {"arrivals": list(record.arrivals)}


def _is_installed(package: str) -> bool:
    return any(True for _ in metadata.distributions(name=package))


def _processor() -> str:
    """Returns the processor's model name on Linux, elsewhere what the platform module knows."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
