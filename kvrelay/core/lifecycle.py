"""How every process of ours begins and ends: told to stop by a signal or by its supervisor, ready with one line.

Standard output carries that one JSON line, for whoever started the process; all else is logged to standard error.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable


def stop_event(*, supervised: bool) -> asyncio.Event:
    """Set by SIGINT, SIGTERM, and for a supervised process by the end of its standard input."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    if supervised:
        on_stdin_closed(stop.set)
    return stop


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
    """Prints `{"event": "ready", ...}`: from now on this process serves."""
    sys.stdout.write(json.dumps({"event": "ready", **fields}) + "\n")
    sys.stdout.flush()
