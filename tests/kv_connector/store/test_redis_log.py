"""What the log says of a Redis that fails: which one it is, why, and for how long, in few lines."""

import logging
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis

from kv_connector.base import AccessDeniedError, FetchOutcome
from kv_connector.settings import RedisSettings
from kv_connector.store.redis_store import RedisConnector
from kvrelay.core.errors import KVError
from tests.kv_connector.backends import EPOCH, LAYOUT, Node, blocks, write_and_publish
from tests.manual_clock import ManualClock
from tests.redis_server import RedisServer

FETCHED, FAILED = FetchOutcome.FETCHED, FetchOutcome.FAILED
TIMEOUT = 0.3  # of one exchange, while Redis is silent
PATIENCE = 10.0
CALM_SECONDS = 10.0  # after which something works again (`kvrelay/core/outages.py`)


class Case:
    """A Redis of its own and a node that stores there. The breakers' clock only moves when a test moves it."""

    def __init__(self, directory: Path) -> None:
        self.server = RedisServer(directory)
        self.clock = ManualClock()
        settings = RedisSettings(url=self.server.url, operation_timeout_seconds=PATIENCE)
        self.store = RedisConnector(settings, clock=self.clock)
        self.node = Node(self.store, "node", 64, LAYOUT, EPOCH)
        self.num_offers = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}, database 0"

    async def publish_new(self) -> None:
        """Publishes two blocks that Redis does not have. Raises KVError if it takes neither."""
        self.num_offers += 1
        await write_and_publish(self.node, blocks(2, tag=str(self.num_offers)))


@pytest.fixture
async def case(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Case]:
    caplog.set_level(logging.INFO)
    made = Case(tmp_path)
    yield made
    await made.store.close()
    made.server.stop()


async def test_a_redis_that_is_full_again_and_again_is_logged_once(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    """Where blocks expire, there is room for some of the next ones."""
    rounds = 20
    with redis.Redis.from_url(case.server.url) as client:
        client.config_set("maxmemory-policy", "noeviction")
        for _ in range(rounds):
            client.config_set("maxmemory", "1mb")
            for _ in range(3):  # refused, and then not sent
                with pytest.raises(KVError, match="none of 2"):
                    await case.publish_new()
            client.config_set("maxmemory", "0")
            case.clock.seconds += 1.0
            await case.publish_new()
    assert case.store.stats.skipped == 2 * 2 * rounds
    [begun] = caplog.messages
    assert begun.startswith(f"Redis refused to write 2 of 2 blocks: {case.address}: OutOfMemoryError: ")
    case.clock.seconds += CALM_SECONDS
    await case.publish_new()
    assert caplog.messages == [begun, f"storing in Redis works again; it failed {3 * rounds} times"]


async def test_a_redis_that_does_not_answer_is_named_with_the_time_that_it_had(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    """What is not even sent fails as well, in the log as in the counters."""
    await case.publish_new()
    case.server.send_signal(signal.SIGSTOP)
    case.store._link._timeout = TIMEOUT
    for _ in range(8):
        assert set(await case.store.fetch(None, blocks(1, tag="1"), timeout=PATIENCE)) == {FAILED}
    for _ in range(2):
        with pytest.raises(KVError, match="none of 2"):
            await case.publish_new()
    assert case.store.stats.skipped == 5 + 2 * 2
    case.server.send_signal(signal.SIGCONT)
    case.store._link._timeout = PATIENCE
    case.clock.seconds += CALM_SECONDS
    assert await case.store.fetch(None, blocks(1, tag="1"), timeout=PATIENCE) == (FETCHED,)
    await case.publish_new()
    [silent, skipped, *again] = caplog.messages
    reason = f"{case.address}: TimeoutError: no answer within {TIMEOUT} s"
    assert silent == f"fetching from Redis failed: {reason}; not logged again while it fails"
    left_alone = f"{case.address}: CircuitOpenError: it has failed before, and is left alone for a while"
    assert skipped == f"publishing to Redis failed: {left_alone}; not logged again while it fails"
    assert again == [
        "fetching from Redis works again; it failed 8 times",
        "publishing to Redis works again; it failed 2 times",
    ]


async def test_a_redis_that_refuses_the_password_is_named_without_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = RedisServer(tmp_path, options=["--requirepass", "s3cr3t-passw0rd"])
    try:
        url = server.url.replace("//", "//n0b0dy:wr0ng-passw0rd@")
        node = Node(RedisConnector(RedisSettings(url=url)), "node", 64, LAYOUT, EPOCH)
        assert await node.connector.fetch(None, blocks(1), timeout=PATIENCE) == (FAILED,)
        with pytest.raises(AccessDeniedError) as denied:
            await write_and_publish(node, blocks(1))
        await node.connector.close()
    finally:
        server.stop()
    address = f"127.0.0.1:{server.port}, database 0"
    for message, what in zip(caplog.messages, ("fetching from", "publishing to"), strict=True):
        assert message.startswith(f"{what} Redis failed: {address}: AuthenticationError: ")
    assert str(denied.value).startswith(f"Redis ({address}) ")
    assert "passw0rd" not in f"{denied.value}{caplog.text}" and "n0b0dy" not in f"{denied.value}{caplog.text}"
