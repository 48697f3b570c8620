"""How many prompt tokens an engine has computed, and in what time. Only sums: a rate is a quotient of differences."""

from dataclasses import dataclass

from kvrelay.engine.plan import SchedulerOutput


@dataclass(slots=True)
class PrefillMeter:
    """Since the engine's start."""

    num_tokens: int = 0
    seconds: float = 0.0

    def count(self, plan: SchedulerOutput, seconds: float) -> None:
        """A step took so long. One that also decodes counts in full: for its prompt tokens it took that long."""
        num_tokens = sum(entry.num_scheduled_tokens for entry in plan.scheduled if entry.num_scheduled_tokens > 1)
        if num_tokens:
            self.num_tokens += num_tokens
            self.seconds += seconds
