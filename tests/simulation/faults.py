"""What goes wrong, by seed or at the n-th opportunity.

Invariant: after `stop` nothing goes wrong any more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from tests.kv_connector.faulty import CallPlan, ConnectorFault
from tests.simulation.network import Fate, Message

_BAD_FATES = tuple(fate for fate in Fate if fate not in (Fate.DELIVER, Fate.DUPLICATE))
_NOTICE_SECONDS = 15.0
_STALL_DELAYS = (0.05, 0.5)


@dataclass(frozen=True, slots=True)
class FaultRates:
    """Probabilities per message, call or step. `slow` is that of a message that takes much longer than usual."""

    message: float = 0.0
    duplicate: float = 0.0
    slow: float = 0.0
    connector: float = 0.0
    damage: float = 0.0
    late_notice: float = 0.0
    step: float = 0.0


CALM = FaultRates()


class SeededFaults:
    """Implements NetworkFaults and ConnectorFaults by chance. `num_injected` counts all faults that can end a call
    badly."""

    def __init__(self, random: Random, rates: FaultRates, *, longest_delay: float = 0.005) -> None:
        self.num_injected = 0
        self._random = random
        self._rates = rates
        self._longest_delay = longest_delay

    def stop(self) -> None:
        self._rates = CALM

    def fate(self, message: Message) -> Fate:
        draw = self._random.random()
        if draw < self._rates.message:
            self.num_injected += 1
            return self._random.choice(_BAD_FATES)
        if message.is_unary and message.kind == "open" and draw < self._rates.message + self._rates.duplicate:
            return Fate.DUPLICATE
        return Fate.DELIVER

    def delay(self) -> float:
        if self._random.random() < self._rates.slow:
            return self._random.uniform(*_STALL_DELAYS)
        return self._random.uniform(0.0002, self._longest_delay)

    def notice(self) -> float:
        """Returns the seconds until an end notices a break: mostly few; an end that gets no sign of it notices by
        keepalive."""
        if self._random.random() < self._rates.late_notice:
            return self._random.uniform(0.0, _NOTICE_SECONDS)
        return self.delay()

    def step_fails(self) -> bool:
        """Tells whether a device fails to carry out the next step."""
        fails = self._random.random() < self._rates.step
        self.num_injected += fails
        return fails

    def plan(self, method: str) -> CallPlan:
        fault = None
        if self._random.random() < self._rates.connector:
            self.num_injected += 1
            fault = self._random.choice(list(ConnectorFault))
        return CallPlan(fault, self._random.uniform(0.0, self._longest_delay))


class NthFault:
    """Implements NetworkFaults and ConnectorFaults so that exactly one message, or one connector call, goes wrong in
    the given way; `where` says which. Only messages for which `counts` holds are counted. With `earlier`, another one
    goes wrong before it."""

    def __init__(
        self,
        number: int,
        *,
        fate: Fate | None = None,
        connector: ConnectorFault | None = None,
        counts: Callable[[Message], bool] = lambda message: True,
        earlier: int = 0,
    ) -> None:
        assert number == 0 or earlier < number
        self.num_injected = 0
        self.where = ""
        self._number = number
        self._earlier = earlier
        self._num_seen = 0
        self._fate = fate
        self._connector = connector
        self._counts = counts
        self._random = Random(number)

    def stop(self) -> None:
        self._number = self._earlier = -1

    def fate(self, message: Message) -> Fate:
        if self._fate is None or not self._counts(message) or not self._is_next(f"{message.method} {message.kind}"):
            return Fate.DELIVER
        return self._fate

    def delay(self) -> float:
        return self._random.uniform(0.0002, 0.002)

    def notice(self) -> float:
        return self.delay()

    def step_fails(self) -> bool:
        return False

    def plan(self, method: str) -> CallPlan:
        if self._connector is None or not self._is_next(method):
            return CallPlan()
        return CallPlan(self._connector)

    def _is_next(self, where: str) -> bool:
        self._num_seen += 1
        if self._num_seen == self._number:
            self.where = where
        elif self._num_seen != self._earlier:
            return False
        self.num_injected += 1
        return True


Faults = SeededFaults | NthFault


def draw_rates(random: Random) -> FaultRates:
    """Draws the rates of a run. One run in six is calm; the others go wrong in a few ways at a time, or in all."""
    if random.random() < 1 / 6:
        return CALM
    return FaultRates(
        message=_draw(random, (0.0, 0.001, 0.005, 0.02)),
        duplicate=_draw(random, (0.0, 0.05, 0.3)),
        slow=_draw(random, (0.0, 0.02, 0.1)),
        connector=_draw(random, (0.0, 0.1, 0.5)),
        damage=_draw(random, (0.0, 0.1, 0.5)),
        late_notice=_draw(random, (0.0, 0.3)),
        step=_draw(random, (0.0, 0.0, 0.0, 0.01)),
    )


def _draw(random: Random, values: Sequence[float]) -> float:
    return random.choice(values)
