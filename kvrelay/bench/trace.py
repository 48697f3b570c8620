"""Request traces in the JSON-lines format published with Mooncake: `timestamp` (ms), `input_length`, `output_length`,
`hash_ids`. Each hash id stands for 512 tokens of the prompt (the last one for the rest); equal ids are equal tokens.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvrelay.bench.base import RequestSpec, Segment
from kvrelay.bench.workloads import Session
from kvrelay.core.errors import ConfigurationError

TRACE_BLOCK_TOKENS = 512


def read_trace(path: Path, *, speedup: float = 1.0, limit: int | None = None) -> list[Session]:
    """Returns one session per request in the order of the file, the first at 0. A `speedup` of 2 halves all times.

    Raises ConfigurationError, which names the line.
    """
    sessions: list[Session] = []
    first: float | None = None
    for number, line in _lines(path):
        if limit is not None and len(sessions) == limit:
            break
        timestamp, request = _parse(path, number, line)
        first = timestamp if first is None else first
        if timestamp < first:
            raise ConfigurationError(f"--trace: {path}:{number}: timestamp is before the first line's")
        sessions.append(Session((timestamp - first) / 1e3 / speedup, [request]))
    if not sessions:
        raise ConfigurationError(f"--trace: {path} holds no requests")
    return sessions


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8") as file:
            yield from ((number, line) for number, line in enumerate(file, start=1) if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--trace: cannot read {path}: {error}") from error


def _parse(path: Path, number: int, line: str) -> tuple[float, RequestSpec]:
    """Returns the timestamp in milliseconds, and the request."""
    try:
        entry: dict[str, Any] = json.loads(line)
        timestamp = float(entry["timestamp"])
        if not math.isfinite(timestamp):
            raise ValueError(f"timestamp is {timestamp}")
        input_length, output_length = int(entry["input_length"]), int(entry["output_length"])
        hash_ids = [int(hash_id) for hash_id in entry["hash_ids"]]
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ConfigurationError(
            f"--trace: {path}:{number} is not an object with timestamp, input_length, output_length and hash_ids "
            f"({type(error).__name__}: {error})"
        ) from error
    num_blocks = -(-input_length // TRACE_BLOCK_TOKENS)
    if input_length < 1 or output_length < 1 or len(hash_ids) != num_blocks:
        raise ConfigurationError(
            f"--trace: {path}:{number}: {input_length} prompt tokens need {num_blocks} hash ids, there are "
            f"{len(hash_ids)}; lengths are at least 1"
        )
    segments = [Segment(f"trace/{hash_id}", TRACE_BLOCK_TOKENS) for hash_id in hash_ids]
    segments[-1] = Segment(segments[-1].name, input_length - TRACE_BLOCK_TOKENS * (num_blocks - 1))
    return timestamp, RequestSpec(tuple(segments), output_length)
