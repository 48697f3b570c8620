"""The connection to a Redis server: one client, a deadline for every exchange, and breakers for a server that fails.

Of the two breakers, `server` is for one that cannot be reached or does not answer, `writes` for one that answers but
refuses to write.
Invariant: no exchange takes longer than its deadline, and none begins while `server` is open. Those under way are never
more than the connections that there may be, so none waits for a connection while its round trip is timed.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import InvalidResponse, RedisError

from kv_connector.settings import RedisSettings
from kv_connector.store.redis_address import redis_address
from kvrelay.core.breaker import CircuitBreaker
from kvrelay.core.clock import Clock
from kvrelay.core.errors import ConfigurationError, KVRelayError

_MIN_CONCLUSIVE_TIMEOUT = 0.25  # seconds; running out of less time than that says nothing about the server

# What keeps a connection open where idle ones are forgotten on the way, and closes one whose other end is gone within
# half a minute. A system may lack some of these names.
_KEEPALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


class CircuitOpenError(KVRelayError):
    """The server has failed too often lately, so no request was sent to it."""

    def __init__(self) -> None:
        super().__init__("it has failed before, and is left alone for a while")


T = TypeVar("T")

UNREACHABLE = (RedisError, OSError, TimeoutError, CircuitOpenError)
# What redis-py raises for answers that its parser takes and it cannot use itself.
_UNUSABLE = (ValueError, TypeError, LookupError, AttributeError)


async def answer_of(command: Awaitable[T]) -> T:
    """Returns the answer to a command. Raises InvalidResponse where one makes redis-py stumble: bytes that were damaged
    on the way are no fault of ours, which would end the node."""
    try:
        return await command
    except _UNUSABLE as error:
        raise InvalidResponse(f"no answer of Redis ({type(error).__name__}: {error})") from error


class _Connections(BlockingConnectionPool):
    """A pool of connections that can all be made anew."""

    def __init__(self, **kwargs: Any) -> None:
        """Takes what redis-py's pool does. Raises what that raises."""
        super().__init__(**kwargs)
        self._era = 0
        self._eras: WeakKeyDictionary[AbstractConnection, int] = WeakKeyDictionary()  # in which they were opened

    def renew(self) -> None:
        """Has every connection that is open by now, in use or not, closed and opened again before its next use."""
        self._era += 1

    async def ensure_connection(self, connection: AbstractConnection) -> None:
        """Opens a connection that redis-py has just taken from the pool, unless it is open and works."""
        if self._eras.setdefault(connection, self._era) != self._era:
            await connection.disconnect(nowait=True)  # the other end may be silent
            self._eras[connection] = self._era
        await super().ensure_connection(connection)


class RedisLink:
    """Connections, which are made when they are needed."""

    def __init__(self, settings: RedisSettings, clock: Clock) -> None:
        """Raises ConfigurationError for a URL that is not valid."""
        self._connections = _connections(settings)
        self.address = redis_address(settings.url)
        self.client = Redis.from_pool(self._connections)
        self.server = CircuitBreaker(clock)
        self.writes = CircuitBreaker(clock, threshold=1)
        self._timeout = settings.operation_timeout_seconds
        self._turns = asyncio.Semaphore(self._connections.max_connections)  # which the URL may set
        self._num_succeeded = 0
        self._closed = False

    def renew(self) -> None:
        """Leaves the connections that there are. They may lead to a server that is not the one of this name any more,
        or nowhere, where new ones reach it."""
        self._connections.renew()

    def described(self, error: Exception) -> str:
        """Returns the server's address, the kind of an error and what it says, without the password: a server that does
        not know a command (HELLO, AUTH) repeats its arguments."""
        said, _, _ = str(error).partition(", with args beginning with")
        return f"{self.address}: {type(error).__name__}: {said}".removesuffix(": ")

    @asynccontextmanager
    async def exchange(self, timeout: float | None = None) -> AsyncIterator[Redis]:
        """Gives the client for one round trip as soon as a connection is free, for at most `timeout` seconds in all.
        Raises one of UNREACHABLE."""
        if not self.server.admits:
            raise CircuitOpenError
        now = asyncio.get_running_loop().time
        deadline = None if timeout is None else now() + timeout
        try:
            async with asyncio.timeout_at(deadline):
                await self._turns.acquire()
        except TimeoutError:
            raise TimeoutError(f"no connection was free, of {self._connections.max_connections}") from None
        try:
            async with self._round_trip(self._timeout if deadline is None else min(deadline - now(), self._timeout)):
                yield self.client
        finally:
            self._turns.release()

    @asynccontextmanager
    async def _round_trip(self, seconds: float) -> AsyncIterator[None]:
        """Limits a round trip to `seconds`, and tells the breaker how it ends. Raises one of UNREACHABLE."""
        permit = self.server.admit()
        if permit is None:
            raise CircuitOpenError
        succeeded_before = self._num_succeeded
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            is_long = seconds >= min(_MIN_CONCLUSIVE_TIMEOUT, self._timeout)
            if is_long and self._num_succeeded == succeeded_before:
                self.server.failed(permit)
                self.renew()  # all may have gone silent, as this one has
            else:  # there was hardly any time, or the server works, as the others show, and only the way to it is slow
                self.server.abandoned(permit)
            raise TimeoutError(f"no answer within {max(seconds, 0.0):.3g} s") from None
        except UNREACHABLE:
            self.server.failed(permit)
            raise
        except BaseException:
            self.server.abandoned(permit)
            raise
        finally:
            if self._closed:  # meanwhile, whereupon redis-py has connected again
                await self.client.aclose()
        self._num_succeeded += 1
        self.server.succeeded()

    async def close(self) -> None:
        """Closes all connections; an exchange under way closes them once more. Raises one of UNREACHABLE, and then
        nothing is left either."""
        self._closed = True
        async with asyncio.timeout(self._timeout):
            await self.client.aclose()


def _connections(settings: RedisSettings) -> _Connections:
    """Returns the pool. Raises ConfigurationError, which does not repeat the URL, since that may hold a password."""
    keepalive = {getattr(socket, name): value for name, value in _KEEPALIVE if hasattr(socket, name)}
    of_tcp = {"socket_keepalive": True, "socket_keepalive_options": keepalive}
    try:
        connections = _Connections.from_url(
            settings.url,
            max_connections=settings.max_connections,
            # None, because redis-py would wait with `asyncio.wait_for`, which before Python 3.12 sometimes loses a
            # cancellation, and with it one of our own deadlines. Every operation here has such a deadline.
            socket_timeout=None,
            socket_connect_timeout=settings.operation_timeout_seconds,
            retry=Retry(NoBackoff(), 1),  # once: the server may have closed an idle connection
            protocol=2,  # RESP2, which proxies and Redis before version 6 speak as well; the URL may say otherwise
            **({} if settings.url.lower().startswith("unix:") else of_tcp),
        )
        # Opens nothing, but takes the URL's parameters or raises.
        connection = connections.connection_class(**connections.connection_kwargs)
    except (ValueError, TypeError, AttributeError, RedisError):  # whichever a wrong parameter happens to cause
        raise ConfigurationError(
            "--redis-url is not valid: use redis://, rediss:// or unix://, and only parameters that redis-py has for it"
        ) from None
    if connection.encoder.decode_responses:
        raise ConfigurationError("--redis-url must not set decode_responses: blocks are bytes")
    return connections
