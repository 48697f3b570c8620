"""A Redis server in the place of a real one. The connector, its breakers and its queue are the real ones.

Invariant: a value is what was stored under its key, or gone. What is read of it may have lost a bit.
"""

import asyncio
from collections.abc import Callable
from enum import Enum
from random import Random
from types import TracebackType
from typing import Any, Self, cast

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from kv_connector.settings import RedisSettings
from kv_connector.store.redis_store import RedisConnector
from kvrelay.core.clock import Clock

_HANG_SECONDS = 3600.0  # longer than any deadline
_EVICTED_SHARE = 0.7


class StoreState(Enum):
    UP = "up"
    DOWN = "down"  # refuses connections
    HANGS = "hangs"
    FULL = "full"  # answers, but stores nothing


class Store:
    """The server. `delay` returns the seconds of a round trip, `damage` is the probability that a value that is read
    has lost a bit; `num_damaged` counts these."""

    def __init__(self, random: Random, delay: Callable[[], float], *, damage: float) -> None:
        self.state = StoreState.UP
        self.damage = damage
        self.num_damaged = 0
        self.values: dict[str, bytes] = {}
        self._expires: dict[str, float] = {}
        self._random = random
        self._delay = delay

    def connector(self, clock: Clock, *, ttl_seconds: int) -> RedisConnector:
        connector = RedisConnector(RedisSettings(ttl_seconds=ttl_seconds), clock=clock)
        connector._link.client = cast("Redis", _Client(self))
        for breaker in (connector._link.server, connector._link.writes):
            breaker._backoff._random = self._random
        return connector

    def evict(self) -> None:
        """Forgets most values, as a server does that needs the memory."""
        for key in list(self.values):
            if self._random.random() < _EVICTED_SHARE:
                del self.values[key]

    async def answers(self) -> None:
        """Returns when a request has been to the server and back. Raises what redis-py raises."""
        await asyncio.sleep(_HANG_SECONDS if self.state is StoreState.HANGS else self._delay())
        if self.state is StoreState.DOWN:
            raise RedisConnectionError("connection refused")

    def get(self, key: str) -> bytes | None:
        if self._expires.get(key, 0.0) <= asyncio.get_running_loop().time():
            self.values.pop(key, None)
        return self.values.get(key)

    def read(self, key: str, first: int, last: int) -> bytes:
        value = bytearray((self.get(key) or b"")[first : last + 1])
        if value and self._random.random() < self.damage:
            self.num_damaged += 1
            value[self._random.randrange(len(value))] ^= 1 << self._random.randrange(8)
        return bytes(value)

    def expire(self, key: str, seconds: int) -> int | Exception:
        if self.state is StoreState.FULL:
            return ResponseError("OOM command not allowed when used memory > 'maxmemory'")
        found = self.get(key) is not None
        self._expires[key] = asyncio.get_running_loop().time() + seconds
        return int(found)

    def set(self, key: str, value: bytes, seconds: int) -> bool | Exception:
        refusal = self.expire(key, seconds)
        if isinstance(refusal, Exception):
            return refusal
        self.values[key] = value
        return True


class _Client:
    """The part of `redis.asyncio.Redis` that the connector uses."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def pipeline(self, *, transaction: bool) -> "_Pipeline":
        assert not transaction
        return _Pipeline(self._store)

    async def aclose(self) -> None:
        """Closes nothing: there are no connections."""


class _Pipeline:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._commands: list[Callable[[], object]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends nothing."""

    def getrange(self, key: str, first: int, last: int) -> None:
        self._commands.append(lambda: self._store.read(key, first, last))

    def expire(self, key: str, seconds: int) -> None:
        self._commands.append(lambda: self._store.expire(key, seconds))

    def unlink(self, *keys: str) -> None:
        self._commands.append(lambda: sum(self._store.values.pop(key, None) is not None for key in keys))

    def set(self, key: str, value: bytes, *, ex: int) -> None:
        self._commands.append(lambda: self._store.set(key, value, ex))

    async def execute(self, *, raise_on_error: bool) -> list[Any]:
        assert not raise_on_error
        await self._store.answers()
        return [command() for command in self._commands]
