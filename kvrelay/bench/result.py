"""What one run gave, and everything of it that belongs in a file."""

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from kvrelay.bench.base import RequestRecord
from kvrelay.bench.settings import BenchSettings
from kvrelay.bench.summary import Summary
from kvrelay.core.errors import ConfigurationError

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class RunResult:
    """`client_cpu_seconds`: processor time this process took during the run. `was_cut`: ended by Ctrl-C."""

    label: str
    summary: Summary
    by_kind: dict[str, Summary]
    records: tuple[RequestRecord, ...]
    client_cpu_seconds: float
    was_cut: bool = False

    @property
    def client_cpu_per_token(self) -> float | None:
        """Seconds."""
        tokens = self.summary.output_tokens
        return self.client_cpu_seconds / tokens if tokens else None


def write_results(path: Path, command: str, model: str, settings: BenchSettings, results: Sequence[RunResult]) -> None:
    """Raises ConfigurationError when the file cannot be written."""
    body = {
        "schema": SCHEMA,
        "command": command,
        "model": model,
        "settings": settings.model_dump(mode="json", exclude={"config", "api_key"}),
        "environment": environment(),
        "runs": [_run(result, with_records=settings.save_requests) for result in results],
    }
    try:
        path.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"--json-file: cannot write {path}: {error.strerror}") from error


def environment() -> dict[str, object]:
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
        "client_cpu_seconds": result.client_cpu_seconds,
        "summary": asdict(result.summary),
        "by_kind": {kind: asdict(summary) for kind, summary in result.by_kind.items()},
    }
    if with_records:
        body["requests"] = [asdict(record) for record in result.records]
    return body


def _is_installed(package: str) -> bool:
    return any(True for _ in metadata.distributions(name=package))


def _processor() -> str:
    """The model's name on Linux, else what the platform module knows."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
