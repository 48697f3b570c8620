"""The connections of one node to a Redis that works: they are shared, some go silent on the way, and idle ones stay
open."""

import asyncio
import socket
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from kv_connector.base import FetchOutcome
from kv_connector.settings import RedisSettings
from kv_connector.store.redis_store import RedisConnector
from tests.chaos.proxy import Proxy
from tests.kv_connector.backends import EPOCH, LAYOUT, Node, RedisHarness, blocks, write_and_publish
from tests.redis_server import RedisServer

FETCHED, MISSING, REFUSED, FAILED = FetchOutcome
TIMEOUT = 0.3  # of an exchange that is to run out of time
PATIENCE = 20.0  # of any other
_PROBES = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)


class Forgetful(Proxy):
    """A proxy that can forget its connections, as a load balancer or a NAT does: they stay open, and nothing comes
    through."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self._forgotten: set[asyncio.StreamWriter] = set()

    @property
    def num_connections(self) -> int:
        return len(self._writers) // 2

    def forget(self) -> None:
        self._forgotten |= self._writers

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                if writer not in self._forgotten:
                    writer.write(data)
                    await writer.drain()


async def test_an_exchange_is_not_timed_while_it_waits_for_a_connection(redis_server: RedisServer) -> None:
    """The first of four has the only connection, which is silent; the others have theirs afterwards."""
    network = Forgetful(redis_server.port)
    await network.start()
    harness = RedisHarness(redis_server.url, "burst")
    settings = replace(harness.settings, url=f"redis://{network.address}/0", max_connections=1)
    connector = RedisConnector(replace(settings, operation_timeout_seconds=PATIENCE))
    node = Node(connector, "node", 16, LAYOUT, EPOCH)
    sent = blocks(4)
    await write_and_publish(node, sent)
    network.forget()
    connector._link._timeout = TIMEOUT
    fetches = [asyncio.create_task(connector.fetch(None, [block], timeout=PATIENCE)) for block in sent]
    await asyncio.sleep(0)
    connector._link._timeout = PATIENCE
    assert await asyncio.gather(*fetches) == [(FAILED,), (FETCHED,), (FETCHED,), (FETCHED,)]
    await connector.close()
    await network.close()


async def test_of_many_connections_that_went_silent_one_costs_a_fetch(redis_server: RedisServer) -> None:
    network = Forgetful(redis_server.port)
    await network.start()
    harness = RedisHarness(redis_server.url, "stale")
    settings = replace(harness.settings, url=f"redis://{network.address}/0", operation_timeout_seconds=PATIENCE)
    connector = RedisConnector(settings)
    node = Node(connector, "node", 16, LAYOUT, EPOCH)
    sent = blocks(4)
    await write_and_publish(node, sent)

    async def fetch_each() -> list[tuple[FetchOutcome, ...]]:
        return await asyncio.gather(*(connector.fetch(None, [block], timeout=PATIENCE) for block in sent))

    assert await fetch_each() == [(FETCHED,)] * 4
    assert network.num_connections == 4
    network.forget()
    connector._link._timeout = TIMEOUT
    assert await connector.fetch(None, sent, timeout=PATIENCE) == (FAILED,) * 4
    connector._link._timeout = PATIENCE
    assert await fetch_each() == [(FETCHED,)] * 4
    await connector.close()
    await network.close()


async def test_failures_in_a_row_are_logged_once(redis_server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    network = Proxy(redis_server.port)
    await network.start()
    network.silence()
    settings = RedisSettings(url=f"redis://{network.address}/0", operation_timeout_seconds=TIMEOUT)
    connector = RedisConnector(settings)
    Node(connector, "node", 16, LAYOUT, EPOCH)
    fetches = [connector.fetch(None, [block], timeout=PATIENCE) for block in blocks(8)]
    assert set(await asyncio.gather(*fetches)) == {(FAILED,)}
    assert caplog.text.count("fetching from Redis failed") == 1
    await connector.close()
    await network.close()


async def test_an_idle_connection_is_probed_before_the_network_forgets_it(redis_server: RedisServer) -> None:
    connector = RedisConnector(RedisSettings(url=redis_server.url))
    Node(connector, "node", 16, LAYOUT, EPOCH)
    assert await connector.fetch(None, blocks(1), timeout=PATIENCE) == (MISSING,)
    [connection] = connector._link._connections._available_connections
    assert connection._writer is not None
    used = connection._writer.get_extra_info("socket")
    assert used.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    first, every, number = (used.getsockopt(socket.IPPROTO_TCP, name) for name in _PROBES)
    assert first + every * number <= 30
    await connector.close()


@pytest.mark.parametrize("scheme", ["unix", "UNIX"])
async def test_a_server_is_reached_over_a_unix_socket(scheme: str, tmp_path: Path) -> None:
    """Which has no probes."""
    server = RedisServer(tmp_path, options=["--unixsocket", str(tmp_path / "redis.sock")])
    try:
        connector = RedisConnector(RedisSettings(url=f"{scheme}://{tmp_path}/redis.sock?db=0"))
        node = Node(connector, "node", 16, LAYOUT, EPOCH)
        await write_and_publish(node, blocks(2))
        assert await connector.fetch(None, blocks(2), timeout=PATIENCE) == (FETCHED, FETCHED)
        await connector.close()
    finally:
        server.stop()
