"""The connection to a Redis server: one client, a deadline for every exchange, and breakers for a server that fails.

Of the two breakers, `server` is for one that cannot be reached or does not answer, `writes` for one that answers but
refuses to write.
Invariant: no exchange takes longer than its deadline, and none begins while `server` is open.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import TypeVar

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import InvalidResponse, RedisError

from kv_connector.settings import RedisSettings
from kvrelay.core.breaker import CircuitBreaker
from kvrelay.core.clock import Clock
from kvrelay.core.errors import ConfigurationError

_MIN_CONCLUSIVE_TIMEOUT = 0.25  # seconds; running out of less time than that says nothing about the server


class CircuitOpenError(Exception):
    """The server has failed too often lately, so no request was sent to it."""


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


def described(error: Exception) -> str:
    """Returns the kind of an error and what it says, which names the server's address and never its password: a server
    that does not know a command (HELLO, AUTH) repeats its arguments."""
    said, _, _ = str(error).partition(", with args beginning with")
    return f"{type(error).__name__}: {said}".removesuffix(": ")


class RedisLink:
    """A connection, which is made at the first command."""

    def __init__(self, settings: RedisSettings, clock: Clock) -> None:
        """Raises ConfigurationError for a URL that is not valid."""
        self.client = _client(settings)
        self.server = CircuitBreaker("Redis", clock)
        self.writes = CircuitBreaker("storing in Redis", clock, threshold=1)
        self._timeout = settings.operation_timeout_seconds
        self._closed = False
        self._is_demoted = False

    def demoted(self) -> None:
        """Notes that the server is a replica by now. Its name or address may be another's, to which only new
        connections lead."""
        self._is_demoted = True

    @asynccontextmanager
    async def exchange(self, timeout: float | None = None) -> AsyncIterator[Redis]:
        """Gives the client for one round trip of at most `timeout` seconds. Raises one of UNREACHABLE."""
        permit = self.server.admit()
        if permit is None:
            raise CircuitOpenError
        seconds = self._timeout if timeout is None else min(timeout, self._timeout)
        try:
            async with asyncio.timeout(seconds):
                if self._is_demoted:
                    self._is_demoted = False
                    await self.client.connection_pool.disconnect(inuse_connections=False)
                yield self.client
        except UNREACHABLE as error:
            if isinstance(error, TimeoutError) and seconds < min(_MIN_CONCLUSIVE_TIMEOUT, self._timeout):
                self.server.abandoned(permit)
            else:
                self.server.failed(permit)
            raise
        except BaseException:
            self.server.abandoned(permit)
            raise
        finally:
            if self._closed:  # meanwhile, whereupon redis-py has connected again
                await self.client.aclose()
        self.server.succeeded()

    async def close(self) -> None:
        """Closes all connections; an exchange under way closes them once more. Raises one of UNREACHABLE, and then
        nothing is left either."""
        self._closed = True
        async with asyncio.timeout(self._timeout):
            await self.client.aclose()


def _client(settings: RedisSettings) -> Redis:
    """Returns the client. Raises ConfigurationError, which does not repeat the URL, since that may hold a password."""
    try:
        connections = BlockingConnectionPool.from_url(
            settings.url,
            max_connections=settings.max_connections,
            timeout=settings.operation_timeout_seconds,
            # None, because redis-py would wait with `asyncio.wait_for`, which before Python 3.12 sometimes loses a
            # cancellation, and with it one of our own deadlines. Every operation here has such a deadline.
            socket_timeout=None,
            socket_connect_timeout=settings.operation_timeout_seconds,
            retry=Retry(NoBackoff(), 1),  # once: the server may have closed an idle connection
            protocol=2,  # RESP2, which proxies and Redis before version 6 speak as well; the URL may say otherwise
        )
        # Opens nothing, but takes the URL's parameters or raises.
        connection = connections.connection_class(**connections.connection_kwargs)
    except (ValueError, TypeError, AttributeError, RedisError):  # whichever a wrong parameter happens to cause
        raise ConfigurationError(
            "--redis-url is not valid: use redis://, rediss:// or unix://, and only parameters that redis-py has for it"
        ) from None
    if connection.encoder.decode_responses:
        raise ConfigurationError("--redis-url must not set decode_responses: blocks are bytes")
    return Redis.from_pool(connections)
