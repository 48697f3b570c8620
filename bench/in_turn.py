"""Our code measured in turn with what it is compared with, so that whatever else the machine does affects both."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class InTurn:
    """The seconds that each took in every round. `theirs` is empty where there is nothing to compare with."""

    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Returns the median of the rounds' ratios, ours / theirs."""
        return statistics.median(own / other for own, other in zip(self.ours, self.theirs, strict=True))


def measure_in_turn(rounds: int, ours: Callable[[], float], theirs: Callable[[], float] | None) -> InTurn:
    """Lets both take turns for `rounds` rounds, after one that does not count. Each returns the seconds that it took;
    `theirs` comes first."""
    found = InTurn()
    for number in range(rounds + 1):
        other = None if theirs is None else theirs()
        own = ours()
        if number == 0:
            continue
        found.ours.append(own)
        if other is not None:
            found.theirs.append(other)
    return found
