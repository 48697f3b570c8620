"""A clock that stands still until a test moves it."""

from kvrelay.core.clock import Clock


class ManualClock(Clock):
    """A clock that shows `seconds`."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def now(self) -> float:
        return self.seconds
