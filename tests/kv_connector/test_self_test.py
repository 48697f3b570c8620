"""The start-up self-test over real transports: it passes where bytes move, and finds what does not or moves wrong."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kv_connector.base import FetchOutcomes, HostConnector
from kv_connector.segments.shared_memory import SharedMemoryConnector
from kv_connector.self_test import check_connector
from kv_connector.settings import RedisSettings, SharedMemorySettings, UcxSettings
from kv_connector.store.redis_store import RedisConnector
from kv_connector.ucx.connector import UcxConnector
from kvrelay.core.errors import ConfigurationError
from kvrelay.core.kv.named_block import NamedBlock
from kvrelay.core.kv.source import KVSource
from tests.kv_connector.backends import CLUSTER_SECRET
from tests.kv_connector.faulty import CallPlan, ConnectorFault, FaultyConnector
from tests.redis_server import RedisServer

Make = Callable[[], HostConnector]


class NoFaults:
    def plan(self, method: str) -> CallPlan:
        return CallPlan()


class PublishingHangs:
    def plan(self, method: str) -> CallPlan:
        return CallPlan(ConnectorFault.STALL if method == "publish" else None)


class LyingConnector(FaultyConnector):
    """A connector that reports every block as fetched though one byte of them is wrong."""

    async def fetch(self, source: KVSource | None, blocks: Sequence[NamedBlock], *, timeout: float) -> FetchOutcomes:
        result = await super().fetch(source, blocks, timeout=timeout)
        assert self._buffer is not None
        self._buffer.memory[-1] ^= 1
        return result


@pytest.fixture(params=["shared_memory", "ucx", "redis"])
def make(request: pytest.FixtureRequest) -> Make:
    if request.param == "shared_memory":
        return lambda: SharedMemoryConnector(SharedMemorySettings())
    if request.param == "ucx":
        return lambda: UcxConnector(UcxSettings(CLUSTER_SECRET))
    server: RedisServer = request.getfixturevalue("redis_server")
    return lambda: RedisConnector(RedisSettings(url=server.url, key_prefix=request.node.name, ttl_seconds=5))


async def test_a_connector_that_moves_bytes_passes_and_leaves_nothing(make: Make) -> None:
    report = await check_connector(make)
    assert not report.problem and report.bytes_per_second > 0
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("kv-")]


async def test_wrong_bytes_are_found_though_the_transport_believes_in_them(make: Make) -> None:
    report = await check_connector(lambda: LyingConnector(make(), NoFaults()))
    assert report.is_wrong and "with other bytes" in report.problem


async def test_a_connector_that_does_not_end_is_abandoned(make: Make) -> None:
    report = await check_connector(lambda: FaultyConnector(make(), PublishingHangs()), timeout=0.05)
    assert report.problem == "it has not ended after 0.1 s" and not report.is_wrong
    while len(asyncio.all_tasks()) > 1:
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    "settings",
    [
        UcxSettings(CLUSTER_SECRET, net_devices="no_such_device0"),  # UCX starts all the same, and reaches nobody
        UcxSettings(CLUSTER_SECRET, host="192.0.2.1", net_devices="lo"),
    ],
)
async def test_ucx_that_is_set_up_wrong_says_so(settings: UcxSettings) -> None:
    report = await check_connector(lambda: UcxConnector(settings))
    assert report.problem == "16 of 16 blocks did not arrive: failed" and not report.is_wrong


async def test_no_redis_and_no_directory_are_problems_and_not_wrong_bytes(tmp_path: object) -> None:
    away = RedisSettings(url="redis://127.0.0.1:1/0")
    report = await check_connector(lambda: RedisConnector(away))
    assert "could be published" in report.problem and not report.is_wrong
    nowhere = SharedMemorySettings(f"{tmp_path}/nowhere")
    report = await check_connector(lambda: SharedMemoryConnector(nowhere))
    assert "is not a directory" in report.problem


async def test_a_redis_that_wants_another_password_is_told_from_one_that_is_away(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, options=["--requirepass", "another"])
    report = await check_connector(lambda: RedisConnector(RedisSettings(url=server.url)))
    server.stop()
    assert report.is_denied and "--redis-url" in report.problem
    report = await check_connector(lambda: RedisConnector(RedisSettings(url=server.url)))
    assert not report.is_denied and "could be published" in report.problem


async def test_a_wrong_setting_raises() -> None:
    with pytest.raises(ConfigurationError, match="KVRELAY_CLUSTER_SECRET"):
        await check_connector(lambda: UcxConnector(UcxSettings("short")))
