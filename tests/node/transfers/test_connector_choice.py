"""Which connectors a node chooses, and with which error it refuses a setting that cannot work."""

import logging
from collections.abc import Mapping

import pytest
from pydantic import ValidationError

from kv_connector.registry import create_connector, is_installed
from kv_connector.self_test import SelfTestReport, check_connector
from kvrelay.core.errors import ConfigurationError
from kvrelay.core.kv.connectors import parse_connectors
from kvrelay.node.settings import NodeSettings
from kvrelay.node.transfers.connector_choice import ConnectorChoice, choose_connectors, choose_working, log_choice
from kvrelay.node.transfers.transfers import connector_settings_of
from tests.kv_connector.backends import CLUSTER_SECRET

ON_LOOPBACK = pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.9", "::1", "localhost"])


@ON_LOOPBACK
def test_auto_on_loopback_is_shared_memory(host: str) -> None:
    choice = choose_connectors("auto", host=host, ucx_installed=True, has_secret=True, broken={})
    assert choice.names == ("shared_memory",) and host in choice.reason


@ON_LOOPBACK
def test_ucx_on_loopback_opens_no_port_to_the_network(host: str) -> None:
    def net_devices(**given: str) -> str:
        return connector_settings_of(NodeSettings.model_validate({"model": "m", **given})).ucx.net_devices

    assert net_devices(host=host) == net_devices(host="10.0.0.2", ucx_host=host) == "lo"
    assert net_devices(host=host, ucx_host="10.0.0.2") == ""
    assert net_devices(host=host, ucx_net_devices="eth0") == "eth0"


@ON_LOOPBACK
async def test_ucx_works_on_every_address_of_loopback(host: str) -> None:
    given = {"model": "m", "host": host, "cluster_secret": CLUSTER_SECRET}
    settings = connector_settings_of(NodeSettings.model_validate(given))
    assert not (await check_connector(lambda: create_connector("ucx", settings))).problem


@pytest.mark.parametrize(
    ("ucx_installed", "has_secret", "names", "reason"),
    [
        (True, True, ("shared_memory", "ucx"), "there is a cluster secret"),
        (False, True, ("redis",), "ucxx is not installed"),
        (True, False, ("redis",), "there is no cluster secret"),
    ],
)
def test_auto_across_hosts_is_ucx_where_it_can_work_and_redis_otherwise(
    ucx_installed: bool, has_secret: bool, names: tuple[str, ...], reason: str
) -> None:
    for host in ("10.0.0.2", "node-7.example"):
        choice = choose_connectors("auto", host=host, ucx_installed=ucx_installed, has_secret=has_secret, broken={})
        assert choice.names == names and reason in choice.reason


def test_connectors_that_are_set_are_taken() -> None:
    choice = choose_connectors("ucx,redis", host="127.0.0.1", ucx_installed=False, has_secret=False, broken={})
    assert choice.names == ("ucx", "redis")
    assert is_installed("ucx"), "the tests need it"


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("redis://user:hunter2@10.0.0.9:6380/3", "10.0.0.9:6380, database 3"),
        ("rediss://:hunter2@store.example?db=2", "store.example:6379, database 2"),
        ("redis://[fd00::9]", "[fd00::9]:6379, database 0"),
        ("unix://:hunter2@/run/redis.sock?db=1", "/run/redis.sock, database 1"),
    ],
)
def test_the_log_says_which_redis_a_node_has_but_not_its_password(
    url: str, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    settings = NodeSettings.model_validate({"model": "m", "host": "10.0.0.2", "redis_url": url})
    log_choice(ConnectorChoice(("ucx", "redis"), "as set"), settings)
    assert caplog.messages == [f"connector ucx,redis: as set; the store is at {place}"]


@pytest.mark.parametrize(
    ("host", "given", "warns"),
    [
        *(("10.0.0.2", {}, True), ("0.0.0.0", {}, True), ("127.0.0.1", {}, False), ("localhost", {}, False)),
        ("10.0.0.2", {"redis_url": "redis://127.0.0.1:6379/0"}, False),  # such as a tunnel's end
    ],
)
def test_a_redis_that_nobody_has_named_is_warned_of_where_other_machines_have_theirs(
    host: str, given: Mapping[str, str], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    settings = NodeSettings.model_validate({"model": "m", "host": host, **given})
    log_choice(ConnectorChoice(("redis",), "as set"), settings)
    assert ("KVRELAY_REDIS_URL is not set" in caplog.text) is warns
    caplog.clear()
    log_choice(ConnectorChoice(("ucx",), "as set"), settings)
    assert not caplog.messages


class SelfTests:
    """The reports of the connectors' self-tests, good unless given. `checked`: the tested ones, in order."""

    def __init__(self, **problems: SelfTestReport) -> None:
        self.checked: list[str] = []
        self._problems = problems

    async def check(self, name: str) -> SelfTestReport:
        self.checked.append(name)
        return self._problems.get(name, SelfTestReport(bytes_per_second=1e9))

    async def choose(self, value: str, host: str = "10.0.0.2") -> ConnectorChoice:
        def choose(broken: Mapping[str, str]) -> ConnectorChoice:
            return choose_connectors(value, host=host, ucx_installed=True, has_secret=True, broken=broken)

        return await choose_working(choose, self.check)


SILENT = SelfTestReport("nothing arrived")
WRONG = SelfTestReport("other bytes", is_wrong=True)
DENIED = SelfTestReport("another password", is_denied=True)


@pytest.mark.parametrize("report", [SILENT, WRONG])
async def test_auto_leaves_out_a_shared_memory_that_fails_its_self_test(report: SelfTestReport) -> None:
    tests = SelfTests(shared_memory=report)
    assert (await tests.choose("auto")).names == ("ucx",), "which it shares with nodes where both work"
    assert tests.checked == ["shared_memory", "ucx"]


@pytest.mark.parametrize("report", [SILENT, WRONG])
@pytest.mark.parametrize(
    ("value", "host", "bad", "remedy"),
    [
        ("ucx,redis", "10.0.0.2", "ucx", "--ucx-net-devices"),
        ("auto", "10.0.0.2", "ucx", "--ucx-net-devices.*another --connector"),
        ("shared_memory", "127.0.0.1", "shared_memory", "--shared-memory-dir"),
        ("auto", "127.0.0.1", "shared_memory", "--shared-memory-dir"),
    ],
)
async def test_a_connector_that_is_set_and_fails_its_self_test_ends_the_start(
    value: str, host: str, bad: str, remedy: str, report: SelfTestReport
) -> None:
    with pytest.raises(ConfigurationError, match=f"connector '{bad}' does not work.*{report.problem}.*{remedy}"):
        await SelfTests(**{bad: report}).choose(value, host)


@pytest.mark.parametrize("report", [WRONG, DENIED])
async def test_a_redis_that_is_away_is_kept_but_not_one_that_waiting_does_not_mend(report: SelfTestReport) -> None:
    assert (await SelfTests(redis=SILENT).choose("ucx,redis")).names == ("ucx", "redis")
    with pytest.raises(ConfigurationError, match="--redis-url"):
        await SelfTests(redis=report).choose("ucx,redis")


async def test_redis_does_not_stand_in_for_a_ucx_that_the_next_start_may_mend() -> None:
    """After a reboot the address of UCX may not be up yet. A node that had chosen Redis would be refused by routers for
    as long as it lives, or have them refuse the others if it came first."""
    tests = SelfTests(ucx=SelfTestReport("no such address"))
    with pytest.raises(ConfigurationError, match=r"^connector 'ucx' does not work.*no such address"):
        await tests.choose("auto")
    assert tests.checked == ["shared_memory", "ucx"]


@pytest.mark.parametrize(("ucx_installed", "has_secret"), [(False, True), (True, False)])
async def test_a_redis_that_is_away_is_taken_where_no_start_would_bring_ucx(
    ucx_installed: bool, has_secret: bool
) -> None:
    def choose(broken: Mapping[str, str]) -> ConnectorChoice:
        return choose_connectors(
            "auto", host="10.0.0.2", ucx_installed=ucx_installed, has_secret=has_secret, broken=broken
        )

    assert (await choose_working(choose, SelfTests(redis=SILENT).check)).names == ("redis",)


async def test_each_connector_is_tested_once() -> None:
    tests = SelfTests()
    assert (await tests.choose("shared_memory,ucx,redis")).names == ("shared_memory", "ucx", "redis")
    assert tests.checked == ["shared_memory", "ucx", "redis"]


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ("", "unknown connector ''"),
        ("rdma", "unknown connector 'rdma'; there are: auto, shared_memory, ucx, redis"),
        ("ucx,,redis", "unknown connector ''"),
        ("ucx,ucx", "listed twice"),
        ("auto,redis", "'auto' stands alone"),
        ("redis,shared_memory", "only shared_memory,redis works"),
        ("redis,ucx", "only ucx,redis works"),
    ],
)
def test_a_wrong_setting_is_refused_with_the_reason(value: str, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        parse_connectors(value)
    with pytest.raises(ValidationError, match=complaint):
        NodeSettings.model_validate({"model": "m", "connector": value})


def test_spaces_in_the_setting_are_ignored() -> None:
    assert NodeSettings.model_validate({"model": "m", "connector": "ucx, redis"}).connector == "ucx,redis"
