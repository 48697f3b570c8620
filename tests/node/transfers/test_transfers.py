"""How a node's connectors are put together from its settings, with a real Redis."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import torch

from kv_connector.base import FetchOutcome, HostConnector
from kv_connector.tiered import TieredConnector
from kvrelay.engine.step_result import EngineLoad
from kvrelay.node.prefill_rate import PrefillRate
from kvrelay.node.settings import NodeSettings
from kvrelay.node.transfers.transfers import choose_transfers, connector_settings_of
from tests.kv_connector.backends import EPOCH, LAYOUT, Node, blocks, write_and_publish
from tests.name_service import give_addresses
from tests.redis_server import RedisServer

TTL = 60  # seconds


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis of its own."""
    made = RedisServer(tmp_path)
    yield made
    made.stop()


async def connector_of(server: RedisServer, names: str, rate: PrefillRate) -> TieredConnector[HostConnector]:
    given = {"model": "m", "connector": names, "redis_url": server.url, "redis_ttl": TTL}
    settings = NodeSettings.model_validate(given)
    connector = (await choose_transfers(settings, torch.device("cpu"), rate)).connector
    assert isinstance(connector, TieredConnector)
    return connector


def test_peers_reach_a_node_at_its_own_address_unless_another_is_set() -> None:
    def host_of(**given: str) -> str:
        return connector_settings_of(NodeSettings.model_validate({"model": "m", **given})).ucx.host

    assert host_of(host="10.0.0.2") == "10.0.0.2"
    assert host_of(host="10.0.0.2", ucx_host="10.0.0.3") == host_of(host="localhost", ucx_host="10.0.0.3") == "10.0.0.3"


async def test_a_name_that_only_this_machine_reaches_is_one_of_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    give_addresses(monkeypatch, "vm.example", "127.0.1.1")
    settings = NodeSettings(model="m", host="vm.example")
    ucx = connector_settings_of(settings).ucx
    assert (ucx.host, ucx.net_devices) == ("127.0.0.1", "lo")
    connector = (await choose_transfers(settings, torch.device("cpu"), PrefillRate())).connector
    assert connector.name == "shared_memory"
    await connector.close()


def test_a_name_that_peers_are_given_is_theirs_to_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian gives a machine's own name an address of loopback, but other machines find its real one."""
    give_addresses(monkeypatch, "vm.example", "127.0.1.1")
    settings = NodeSettings(model="m", host="0.0.0.0", ucx_host="vm.example")
    ucx = connector_settings_of(settings).ucx
    assert (ucx.host, ucx.net_devices) == ("vm.example", "")


def test_segments_are_made_where_is_set() -> None:
    settings = NodeSettings.model_validate({"model": "m", "shared_memory_dir": "/somewhere"})
    assert connector_settings_of(settings).shared_memory.directory == "/somewhere"


async def test_a_store_behind_another_connector_is_judged_by_how_fast_the_node_computes(server: RedisServer) -> None:
    rate = PrefillRate()
    node = Node(await connector_of(server, "shared_memory,redis", rate), "node", 1, LAYOUT, EPOCH)
    await write_and_publish(node, blocks(1))
    assert await node.connector.fetch(None, blocks(1), timeout=10) == (FetchOutcome.FETCHED,)
    rate.observe(EngineLoad(num_prefilled_tokens=1_000_000_000, prefill_seconds=1e-6))
    assert await node.connector.fetch(None, blocks(1), timeout=10) == (FetchOutcome.MISSING,)
    assert node.connector.all_stats()["redis"].not_worth == 1
    await node.connector.close()


async def test_blocks_stay_in_a_store_as_long_as_is_set_and_that_of_the_self_test_for_seconds(
    server: RedisServer,
) -> None:
    node = Node(await connector_of(server, "redis", PrefillRate()), "node", 1, LAYOUT, EPOCH)
    await write_and_publish(node, blocks(1))
    with redis.Redis.from_url(server.url) as client:
        [of_node] = client.keys("kvrelay:*")
        [of_self_test] = client.keys("kvrelay-self-test:*")
        assert 0 < client.ttl(of_self_test) <= 10 < client.ttl(of_node) <= TTL
    await node.connector.close()
