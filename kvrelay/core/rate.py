"""How fast something goes, by what was measured."""

_NEWEST_WEIGHT = 0.2  # of a sample in the average


class Rate:
    """Units per second: an exponentially weighted average over samples."""

    def __init__(self) -> None:
        self._value: float | None = None

    @property
    def per_second(self) -> float | None:
        return self._value

    def observe(self, units: float, seconds: float) -> None:
        """Adds a sample, unless it has no units or took no time."""
        if units <= 0 or seconds <= 0:
            return
        sample = units / seconds
        self._value = sample if self._value is None else self._value + _NEWEST_WEIGHT * (sample - self._value)
