"""How fast the most important cases have to be on one GPU, an H200. On other GPUs these are only yardsticks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.gpu.report import Result

FLASH = "sdpa flash"
"""Name of the peer that prefill is compared with: torch's SDPA with its flash kernel."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A speed that the result named `result` has to reach. With a `peer` it is the peer's time over ours, otherwise the
    floor over our time; `least` is what it must be at least."""

    what: str
    result: str
    least: float
    peer: str = ""

    def reached(self, result: Result) -> float | None:
        """Returns what was reached, or None when it was not measured."""
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
    """Yields a line for each bar."""
    by_name = {result.name: result for result in results}
    for bar in bars:
        result = by_name.get(bar.result)
        reached = None if result is None else bar.reached(result)
        if result is None or reached is None:
            yield f"not measured  {bar.what} (at least {bar.least:.0%})"
        else:
            verdict = "WRONG" if not result.is_right else "passed" if reached >= bar.least else "MISSED"
            yield f"{verdict:12}  {bar.what}: {reached:.0%} (at least {bar.least:.0%})"
