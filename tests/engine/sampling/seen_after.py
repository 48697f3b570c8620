"""What penalties read of a sequence that has a prompt and an output."""

from collections.abc import Iterable

from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.engine.sampling.penalties import seen_tokens
from kvrelay.engine.sampling.seen_tokens import SeenTokens


def seen_after(params: SamplingParams, prompt: Iterable[int], output: Iterable[int]) -> SeenTokens | None:
    seen = seen_tokens(params, prompt)
    if seen is not None:
        seen.add(output)
    return seen
