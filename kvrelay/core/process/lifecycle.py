"""How every process begins and ends: it announces with one line that it is ready, and stops at a signal or when its
supervisor is gone.

Standard output carries only that JSON line, for the process that started this one. Logs go to standard error.
"""

import asyncio
import gc
import json
import os
import resource
import signal
import sys
from collections.abc import Callable

from kvrelay.core.errors import ConfigurationError

# Of the objects made since the last collection, and of collections of younger objects.
_GC_THRESHOLDS = (50_000, 20, 50)


class StopSignals:
    """Two events: `stop` is set by SIGINT or SIGTERM, `hurry` by the second of them. SIGHUP, which a closed terminal
    sends, sets `stop` alone, because a shell may send it once more; where it is ignored (`nohup`), it stays so.

    A supervised process is also asked by the end of its standard input, and hurries only when asked in both ways:
    systemd, for one, sends a signal to all processes of a service, to which their supervisor adds its own without
    haste."""

    def __init__(self, *, supervised: bool) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        self._supervised = supervised
        self._asked: set[str] = set()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._ask, "signal")
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.stop.set)
        if supervised:
            on_stdin_closed(lambda: self._ask("standard input"))

    def _ask(self, how: str) -> None:
        if self.stop.is_set() and not (self._supervised and how in self._asked):
            self.hurry.set()
        self._asked.add(how)
        self.stop.set()


def raise_open_files_limit() -> int:
    """Lets this process open as many files as the system allows, and returns how many. A connection is one, and with
    the usual limit of 1,024 new clients and nodes would be cut off before `max_concurrent_requests` are running."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def on_stdin_closed(action: Callable[[], object]) -> None:
    """Calls `action` when standard input ends, which it does whenever the parent process has ended. Raises
    ConfigurationError for a standard input of which nobody is told that it ends."""
    loop = asyncio.get_running_loop()
    descriptor = sys.stdin.fileno()

    def on_input() -> None:
        if not os.read(descriptor, 4096):
            loop.remove_reader(descriptor)
            action()

    try:
        loop.add_reader(descriptor, on_input)
    except OSError as error:  # EPERM: epoll takes neither files nor /dev/null
        raise ConfigurationError(
            f"--supervised: standard input ({error.strerror}) does not tell when the program that started this one "
            "ends; let it be a pipe, or leave --supervised out"
        ) from error


def announce_ready(**fields: object) -> None:
    """Prints `{"event": "ready", ...}`, because from now on this process serves. Also exempts all objects made so far
    from garbage collection: they stay to the end, and in a node every full collection would look at a quarter of a
    million of them while requests wait. Of those made later few are garbage that only a collection finds, but all that
    belong to a thousand requests are looked at: a collection begins for fifty thousand new ones, not for 700."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    say_ready(json.dumps({"event": "ready", **fields}))


def say_ready(line: str) -> None:
    """Prints a line on standard output at once. If nobody reads there any more, or the disk is full, the line is lost:
    a process that serves does not end for it."""
    try:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    except OSError:  # what is still to be written would be tried again at the end, and fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
