"""How fast this node computes prompts, according to its engine; fetching a block has to be faster to be worth it."""

from kvrelay.core.rate import Rate
from kvrelay.engine.step_result import EngineLoad


class PrefillRate:
    """The rate over the load reports, all of which are to be given to `observe`."""

    def __init__(self) -> None:
        self._rate = Rate()
        self._tokens = 0
        self._seconds = 0.0

    def observe(self, load: EngineLoad) -> None:
        self._rate.observe(load.num_prefilled_tokens - self._tokens, load.prefill_seconds - self._seconds)
        self._tokens, self._seconds = load.num_prefilled_tokens, load.prefill_seconds

    def seconds(self, num_tokens: int) -> float | None:
        """Returns the seconds that computing so many tokens takes; None until a prompt was computed here."""
        rate = self._rate.per_second
        return None if rate is None else num_tokens / rate
