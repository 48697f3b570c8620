"""A process that Ctrl-C ends without a traceback, and imports that it ends at once.

An interrupt is an exception, and in the middle of an import that may show as a traceback, become an ImportError (in a
compiled module), or be lost in a callback, after which the process would go on. Little is imported here, because
everything comes after it.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

INTERRUPTED = 130  # the exit status that a shell gives to what Ctrl-C has ended


@contextmanager
def interruptible_imports() -> Iterator[None]:
    """Lets an interrupt end the process with status 130 and without a word, unless interrupts are ignored."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def exit_with(run: Callable[[], int]) -> NoReturn:
    """Ends the process with the status that `run` returns, or with 130 if an interrupt ends it."""
    try:
        sys.exit(run())
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
