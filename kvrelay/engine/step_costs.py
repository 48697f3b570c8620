"""What steps have cost: sums over prompt tokens, from which readers get rates, and two averages.

The averages are how long a step takes that only decodes, and how much longer one prompt token makes it. By them the
scheduler knows how many prompt tokens are cheap beside decodes. That differs by a factor of ten between processors that
read the same weights in the same time, and it changes with the cores that a node borrows.
"""

import math

from kvrelay.engine.plan import SchedulerOutput

LEAST_PROMPT_TOKENS = 16  # fewer say little about the cost of one
UNNOTICED_SECONDS = 0.010  # what a step may take longer even if decoding alone takes less
_LEAST_TOKEN_SECONDS = 1e-9  # no processor computes a prompt token faster, but the average may fall below any number
_NEWEST_WEIGHT = 1 / 8


class StepCosts:
    """The costs of one engine's steps. `num_prompt_tokens` and `prompt_seconds` are sums since its start: the tokens,
    and the time of all steps that computed some. `newest_decode` is how many seconds the newest step took, 0 if it
    computed some."""

    def __init__(self) -> None:
        self.num_prompt_tokens = 0
        self.prompt_seconds = 0.0
        self.newest_decode = 0.0
        # Moving averages in seconds; None before the first step of the kind.
        self._decode: float | None = None
        self._prompt_token: float | None = None

    def count(self, plan: SchedulerOutput, seconds: float) -> None:
        """Adds a step that took `seconds`. In the sums, a step that also decodes counts in full, because its prompt
        tokens took that long. For the averages, it is assumed that without its prompt tokens a step would have taken as
        long as one that only decodes, which above all reads the weights."""
        num_tokens = sum(entry.num_scheduled_tokens for entry in plan.scheduled if entry.num_scheduled_tokens > 1)
        self.newest_decode = seconds if num_tokens == 0 else 0.0
        if num_tokens == 0:
            self._decode = _averaged(self._decode, seconds)
            return
        self.num_prompt_tokens += num_tokens
        self.prompt_seconds += seconds
        if num_tokens >= LEAST_PROMPT_TOKENS and self._decode is not None:
            longer = max(0.0, seconds - self._decode)
            self._prompt_token = _averaged(self._prompt_token, longer / num_tokens)

    def prompt_tokens_within(self, seconds: float) -> float:
        """Returns how many prompt tokens take so long, at the rate of all so far; infinitely many before the first."""
        return seconds * self.num_prompt_tokens / self.prompt_seconds if self.prompt_seconds else math.inf

    def num_cheap_tokens(self, *, on_borrowed_cores: bool = False) -> int:
        """Returns how many prompt tokens make a step that decodes half as long again at most, or `UNNOTICED_SECONDS`
        longer; 0 as long as that is unknown. On borrowed cores a step may take twice as long, which is about what it
        takes without them."""
        if self._decode is None or not self._prompt_token:
            return 0
        longer = self._decode if on_borrowed_cores else self._decode / 2
        return int(max(longer, UNNOTICED_SECONDS) / max(self._prompt_token, _LEAST_TOKEN_SECONDS))


def _averaged(average: float | None, newest: float) -> float:
    return newest if average is None else average + _NEWEST_WEIGHT * (newest - average)
