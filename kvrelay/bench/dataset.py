"""Data sets of one's own prompts: JSON lines of `prompt` and, where it is known, `output_tokens`, as vLLM's benchmark
reads them too (its data set `custom`)."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from kvrelay.bench.base import RequestSpec
from kvrelay.bench.json_lines import read_objects
from kvrelay.bench.workloads import Lengths
from kvrelay.core.errors import ConfigurationError


def read_dataset(path: Path, outputs: Lengths, *, limit: int | None, seed: int) -> list[RequestSpec]:
    """Returns a request for each line, in the order of the file. Without `output_tokens` its output is as long as is
    drawn from `outputs`.

    Raises ConfigurationError, which names the line.
    """
    draw = random.Random(f"dataset/{seed}")
    entries = islice(read_objects("--dataset", path), limit)
    return [_request(place, entry, outputs.draw(draw)) for place, entry in entries]


def _request(place: str, entry: dict[str, Any], num_drawn_tokens: int) -> RequestSpec:
    prompt, num_tokens = entry.get("prompt"), entry.get("output_tokens", num_drawn_tokens)
    if not isinstance(prompt, str) or not prompt:
        raise ConfigurationError(f"{place}: prompt must be a text, got {prompt!r:.40}")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can hold
        raise ConfigurationError(f"{place}: prompt is no valid text: {error}") from error
    if not isinstance(num_tokens, int) or isinstance(num_tokens, bool) or num_tokens < 1:
        raise ConfigurationError(f"{place}: output_tokens must be a number from 1 on, got {num_tokens!r:.40}")
    return RequestSpec((), num_tokens, text=prompt)


def warmup_of(requests: Sequence[RequestSpec], count: int) -> list[RequestSpec]:
    """Returns requests that are about as long as the first of these, with the same words, and begin in their middle."""
    return [replace(one, text=_from_the_middle(one.text)) for one in islice(cycle(requests), count)]


def _from_the_middle(text: str) -> str:
    middle = len(text) // 2  # not by words: Chinese and Japanese have no spaces
    return text[middle:] + text[:middle]
