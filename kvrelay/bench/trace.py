"""Request traces in the JSON-lines format published with Mooncake: `timestamp` (ms), `input_length`, `output_length`,
`hash_ids`. Each hash id stands for 512 tokens of the prompt (the last one for the rest); equal ids are equal tokens.
"""

import math
from itertools import islice
from pathlib import Path
from typing import Any

from kvrelay.bench.base import RequestSpec, Segment
from kvrelay.bench.json_lines import read_objects
from kvrelay.bench.workloads import Session
from kvrelay.core.errors import ConfigurationError

TRACE_BLOCK_TOKENS = 512


def read_trace(path: Path, *, speedup: float = 1.0, limit: int | None = None) -> list[Session]:
    """Returns one session per request in the order of the file, the first at 0. A `speedup` of 2 halves all times.

    Raises ConfigurationError, which names the line.
    """
    sessions: list[Session] = []
    first: float | None = None
    for place, entry in islice(read_objects("--trace", path), limit):
        timestamp, request = _parse(place, entry)
        first = timestamp if first is None else first
        if timestamp < first:
            raise ConfigurationError(f"{place}: timestamp is before the first line's")
        sessions.append(Session((timestamp - first) / 1e3 / speedup, [request]))
    return sessions


def _parse(place: str, entry: dict[str, Any]) -> tuple[float, RequestSpec]:
    """Returns the timestamp in milliseconds, and the request."""
    try:
        timestamp = float(entry["timestamp"])
        if not math.isfinite(timestamp):
            raise ValueError(f"timestamp is {timestamp}")
        input_length, output_length = int(entry["input_length"]), int(entry["output_length"])
        hash_ids = [int(hash_id) for hash_id in entry["hash_ids"]]
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise ConfigurationError(
            f"{place} is not an object with timestamp, input_length, output_length and hash_ids "
            f"({type(error).__name__}: {error})"
        ) from error
    num_blocks = -(-input_length // TRACE_BLOCK_TOKENS)
    if input_length < 1 or output_length < 1 or len(hash_ids) != num_blocks:
        raise ConfigurationError(
            f"{place}: {input_length} prompt tokens need {num_blocks} hash ids, there are "
            f"{len(hash_ids)}; lengths are at least 1"
        )
    segments = [Segment(f"trace/{hash_id}", TRACE_BLOCK_TOKENS) for hash_id in hash_ids]
    segments[-1] = Segment(segments[-1].name, input_length - TRACE_BLOCK_TOKENS * (num_blocks - 1))
    return timestamp, RequestSpec(tuple(segments), output_length)
