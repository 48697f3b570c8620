"""Circuit breakers of the sources that KV is fetched from, one for each that fails.

Invariant: a source has a breaker from its first failure until it works again. Of too many, the oldest gives way: a node
that has ended never works again.
"""

from random import Random

from kvrelay.core.breaker import CircuitBreaker, Permit
from kvrelay.core.clock import Clock
from kvrelay.core.kv.source import KVSource

_CAPACITY = 256


class SourceBreakers:
    """The breakers of one reader, used from one loop. `random` draws for how long sources are left alone.

    Whoever was admitted calls `succeeded`, `failed` or `abandoned`, once, as with a `CircuitBreaker`."""

    def __init__(self, clock: Clock, *, random: Random | None = None) -> None:
        self._clock = clock
        self._random = random
        self._breakers: dict[KVSource, CircuitBreaker] = {}  # oldest first

    def open(self) -> list[KVSource]:
        """Returns the sources that are left alone, or tried again. They may have ended meanwhile."""
        return [source for source, breaker in self._breakers.items() if breaker.is_open]

    def refusing(self) -> list[KVSource]:
        """Returns the sources for which `admit` returns no permit now."""
        return [source for source, breaker in self._breakers.items() if not breaker.admits]

    def admit(self, source: KVSource) -> Permit | None:
        """Returns a permit, with which the end of the attempt is reported, or None if there is to be none."""
        breaker = self._breakers.get(source)
        return Permit(object()) if breaker is None else breaker.admit()

    def succeeded(self, source: KVSource) -> None:
        breaker = self._breakers.pop(source, None)
        if breaker is not None:
            breaker.succeeded()

    def failed(self, source: KVSource, permit: Permit) -> None:
        breaker = self._breakers.get(source)
        if breaker is None:
            breaker = self._breakers[source] = CircuitBreaker(self._clock, random=self._random)
            if len(self._breakers) > _CAPACITY:
                del self._breakers[next(iter(self._breakers))]
        breaker.failed(permit)

    def abandoned(self, source: KVSource, permit: Permit) -> None:
        """Ends an attempt that says nothing about the source."""
        breaker = self._breakers.get(source)
        if breaker is not None:
            breaker.abandoned(permit)
