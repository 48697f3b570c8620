"""How fast this node computes prompts, as its engine reports it: what fetching a block has to beat."""

from kv_connector.cost_gate import Rate
from kvrelay.engine.request import EngineLoad


class PrefillRate:
    """Fed with every load report; says nothing until a prompt was computed here."""

    def __init__(self) -> None:
        self._rate = Rate()
        self._tokens = 0
        self._seconds = 0.0

    def observe(self, load: EngineLoad) -> None:
        self._rate.observe(load.num_prefilled_tokens - self._tokens, load.prefill_seconds - self._seconds)
        self._tokens, self._seconds = load.num_prefilled_tokens, load.prefill_seconds

    def seconds(self, num_tokens: int) -> float | None:
        """To compute so many tokens; None while that is unknown."""
        rate = self._rate.per_second
        return None if rate is None else num_tokens / rate
