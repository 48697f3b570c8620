"""How every process of ours begins and ends: told to stop by a signal or by its supervisor, ready with one line.

Standard output carries that one JSON line, for whoever started the process; all else is logged to standard error.
"""

import asyncio
import gc
import json
import os
import signal
import sys
from collections.abc import Callable


class StopSignals:
    """`stop` is set by SIGINT, SIGTERM, and for a supervised process by the end of its standard input; `hurry` by the
    second of these."""

    def __init__(self, *, supervised: bool) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        if supervised:
            on_stdin_closed(self._on_signal)

    def _on_signal(self) -> None:
        (self.hurry if self.stop.is_set() else self.stop).set()


def on_stdin_closed(action: Callable[[], object]) -> None:
    """Calls `action` once standard input ends, which it does when the parent process is gone, however it went."""
    loop = asyncio.get_running_loop()
    descriptor = sys.stdin.fileno()

    def on_input() -> None:
        if not os.read(descriptor, 4096):
            loop.remove_reader(descriptor)
            action()

    loop.add_reader(descriptor, on_input)


def announce_ready(**fields: object) -> None:
    """Prints `{"event": "ready", ...}`: from now on this process serves. What it has made so far stays to its end, and
    leaves the garbage collector's sight: each full collection would look at all of it, a quarter of a million objects
    in a node, while requests wait."""
    gc.collect()
    gc.freeze()
    sys.stdout.write(json.dumps({"event": "ready", **fields}) + "\n")
    sys.stdout.flush()
