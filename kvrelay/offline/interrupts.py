"""Ctrl-C while a batch runs.

Invariant: no step is interrupted half-way. An interrupt is an exception that Python raises between any two
instructions, after which the engine's counts of blocks and sequences would be wrong.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_held() -> Iterator[Callable[[], None]]:
    """Holds back Ctrl-C and yields a function that raises KeyboardInterrupt if one came; so does the end of the context
    unless it raises something else. Changes nothing in a thread that gets no signals, and where the program has a
    handler of its own."""
    came = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True

    def check() -> None:
        if came:
            raise KeyboardInterrupt

    handled_here = threading.current_thread() is threading.main_thread()
    if not handled_here or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield check
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    check()
