"""The progress bar of a batch, on standard error: it may fail to be drawn, and the batch goes on."""

import sys
from contextlib import suppress
from typing import Any, TextIO

from tqdm import tqdm


def progress_bar(total: int, *, shown: bool) -> "tqdm[Any]":
    """Returns a bar of `total` prompts. It is not shown where there is no standard error."""
    stream = _Lossy(sys.stderr) if sys.stderr is not None else None
    disable = stream is None or not shown
    return tqdm(total=total, desc="generating", unit=" prompts", disable=disable, dynamic_ncols=True, file=stream)


class _Lossy:
    """A stream of which a write that fails is forgotten: a full disk or a pipe that nobody reads any more would
    otherwise end the batch, and leave tqdm's lock taken."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):  # ValueError: it is closed
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()
