"""Files of JSON objects, one on each line, that a flag names."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvrelay.core.errors import ConfigurationError


def read_objects(flag: str, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields every object, with the place that an error about it should name; skips empty lines.

    Raises ConfigurationError if the file cannot be read, has no object, or has a line that is none.
    """
    is_empty = True
    for number, line in _lines(flag, path):
        is_empty = False
        place = f"{flag}: {path}:{number}"
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigurationError(f"{place} is not JSON: {error}") from error
        if not isinstance(entry, dict):
            raise ConfigurationError(f"{place} is not a JSON object")
        yield place, entry
    if is_empty:
        raise ConfigurationError(f"{flag}: {path} holds no requests")


def _lines(flag: str, path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8") as file:
            yield from ((number, line) for number, line in enumerate(file, start=1) if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{flag}: cannot read {path}: {error}") from error
