"""How fast what matters most has to be on one card, an H200; elsewhere they are yardsticks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.gpu.report import Result

FLASH = "sdpa flash"
"""The peer that prefill is held against: torch's SDPA, by its flash kernel."""


@dataclass(frozen=True, slots=True)
class Bar:
    """`peer`: how many times as long the other needs; without one, the share of the floor. `least` of it is reached."""

    what: str
    result: str
    least: float
    peer: str = ""

    def reached(self, result: Result) -> float | None:
        """None: not measured."""
        if result.problem or (self.peer and self.peer not in result.peers):
            return None
        return result.peers[self.peer] / result.seconds if self.peer else result.of_floor


BARS = (
    Bar("decode attention, batch 64, 4k context: of copy bandwidth", "decode 64 x 4096, bfloat16 KV", 0.8),
    Bar("prefill attention, 512 tokens: of flash SDPA's speed", "prefill 512 after 0, bfloat16 KV", 0.6, FLASH),
    Bar("prefill attention, 2048 tokens: of flash SDPA's speed", "prefill 2048 after 0, bfloat16 KV", 0.6, FLASH),
    Bar("prefill attention, 8192 tokens: of flash SDPA's speed", "prefill 8192 after 0, bfloat16 KV", 0.6, FLASH),
    Bar("decode step, 8B, batch 64: of its floor", "llama-8b decode step 64 x 1024", 0.7),
)


def judged(results: Sequence[Result], bars: Sequence[Bar] = BARS) -> Iterator[str]:
    """A line for each bar."""
    by_name = {result.name: result for result in results}
    for bar in bars:
        result = by_name.get(bar.result)
        reached = None if result is None else bar.reached(result)
        if result is None or reached is None:
            yield f"not measured  {bar.what} (at least {bar.least:.0%})"
        else:
            verdict = "WRONG" if not result.is_right else "passed" if reached >= bar.least else "MISSED"
            yield f"{verdict:12}  {bar.what}: {reached:.0%} (at least {bar.least:.0%})"
