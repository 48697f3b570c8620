"""How many prompt tokens an engine has computed, and how long that took. Readers compute rates from differences of
these sums."""

from dataclasses import dataclass

from kvrelay.engine.plan import SchedulerOutput


@dataclass(slots=True)
class PrefillMeter:
    """Sums since the engine's start. `seconds` is the time of all steps that computed prompt tokens."""

    num_tokens: int = 0
    seconds: float = 0.0

    def count(self, plan: SchedulerOutput, seconds: float) -> None:
        """Adds a step that took `seconds`. A step that also decodes counts in full, because its prompt tokens took that
        long."""
        num_tokens = sum(entry.num_scheduled_tokens for entry in plan.scheduled if entry.num_scheduled_tokens > 1)
        if num_tokens:
            self.num_tokens += num_tokens
            self.seconds += seconds
