"""A process that Ctrl-C ends without a traceback, and imports that it, or SIGTERM in a container, ends at once.

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
_TERMINATED = 143  # that of SIGTERM


@contextmanager
def interruptible_imports() -> Iterator[None]:
    """Lets an interrupt end the process with status 130 and without a word, unless interrupts are ignored. Where it is
    the first process of a container, SIGTERM ends it with status 143 from now on, until it is handled otherwise."""
    if os.getpid() == 1 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        # Linux keeps from process 1 what it does not handle: it would go on, and later begin to serve.
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(_TERMINATED))
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
