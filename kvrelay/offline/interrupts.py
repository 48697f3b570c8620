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
    """Holds back Ctrl-C and yields a function that calls the program's handler for each that came: Python's own raises
    KeyboardInterrupt, and so does asyncio's for the second. The end of the context calls it, too, unless it raises
    something else. A handler may put another in its place, which then gets what comes after. Changes nothing in a
    thread that gets no signals, and where no function handles Ctrl-C."""
    came: list[FrameType | None] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(frame)

    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield lambda: None
        return

    def call_handler() -> None:
        nonlocal handler
        while came and callable(handler):
            handler(signal.SIGINT, came.pop(0))
            if signal.getsignal(signal.SIGINT) is not note:
                handler = signal.getsignal(signal.SIGINT)

    def call_and_hold_again() -> None:
        call_handler()
        if callable(handler):
            signal.signal(signal.SIGINT, note)

    signal.signal(signal.SIGINT, note)
    try:
        yield call_and_hold_again
    finally:
        if signal.getsignal(signal.SIGINT) is note:
            signal.signal(signal.SIGINT, handler)
    call_handler()
