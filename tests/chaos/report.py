"""The report of a run, for people and for programs."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Report:
    """The findings of a run. The fields in `MUST_BE_ZERO` decide; the others inform. Times are in seconds, `growth` is
    in bytes by process."""

    proof: str
    connector: str
    seed: int
    seconds: float = 0.0
    requests: int = 0
    refused_requests: int = 0
    aborted_by_clients: int = 0
    failed_requests: int = 0
    differing_streams: int = 0
    duplicates_or_gaps: int = 0
    blocks_left: int = 0
    leases_left: int = 0
    requests_left: int = 0
    processes_left: int = 0
    segments_left: int = 0
    problems: list[str] = field(default_factory=list)
    longest_stall: float = 0.0
    longest_wait_for_first_chunk: float = 0.0
    faults: dict[str, int] = field(default_factory=dict)
    migrations: int = 0
    recomputed_tokens: int = 0
    growth: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)
    errors_logged: list[str] = field(default_factory=list)

    @property
    def violations(self) -> dict[str, Any]:
        """Returns the fields that must be zero or empty and are not."""
        return {name: getattr(self, name) for name in MUST_BE_ZERO if getattr(self, name)}

    def readable(self) -> str:
        lines = [f"{self.proof} over {self.connector}, seed {self.seed}, {self.seconds:.0f} s"]
        for name in MUST_BE_ZERO:
            value = getattr(self, name)
            count = len(value) if isinstance(value, list) else value
            lines.append(f"  {'ok ' if not value else 'BAD'} {name.replace('_', ' ')}: {count}")
        lines.append(f"  requests: {self.requests}, of which clients left {self.aborted_by_clients}")
        lines.append(f"  refused, and sent again: {self.refused_requests}")
        lines.append(f"  placed again: {self.migrations} times, {self.recomputed_tokens} tokens computed again")
        lines.append(
            f"  longest stall a client saw: {self.longest_stall:.1f} s between two chunks, "
            f"{self.longest_wait_for_first_chunk:.1f} s before the first"
        )
        lines += [f"  {name} has grown by {grown / 2**20:.1f} MiB" for name, grown in self.growth.items()]
        lines += [f"  {count} x {kind}" for kind, count in self.faults.items()]
        lines += [f"  - {line}" for line in (*self.problems, *self.examples, *self.errors_logged)]
        return "\n".join(lines)


MUST_BE_ZERO = (
    "failed_requests",
    "differing_streams",
    "duplicates_or_gaps",
    "blocks_left",
    "leases_left",
    "requests_left",
    "processes_left",
    "segments_left",
    "problems",
    "errors_logged",
)
