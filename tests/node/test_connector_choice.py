"""Which connectors a node runs on, and what it says of a setting that can not work."""

import pytest
from pydantic import ValidationError

from kvrelay.core.connectors import can_exchange, parse_connectors
from kvrelay.core.errors import ConfigurationError
from kvrelay.engine.request import EngineLoad
from kvrelay.node.connector_choice import choose_connectors, is_ucx_installed
from kvrelay.node.prefill_rate import PrefillRate
from kvrelay.node.settings import NodeSettings


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.9", "::1", "localhost"])
def test_auto_on_loopback_is_shared_memory(host: str) -> None:
    choice = choose_connectors("auto", host=host, ucx_installed=True, has_secret=True)
    assert choice.names == ("shared_memory",) and host in choice.reason


@pytest.mark.parametrize(
    ("ucx_installed", "has_secret", "names", "reason"),
    [
        (True, True, ("shared_memory", "ucx"), "there is a cluster secret"),
        (False, True, ("redis",), "ucxx is not installed"),
        (True, False, ("redis",), "there is no cluster secret"),
    ],
)
def test_auto_across_hosts(ucx_installed: bool, has_secret: bool, names: tuple[str, ...], reason: str) -> None:
    for host in ("10.0.0.2", "node-7.example"):
        choice = choose_connectors("auto", host=host, ucx_installed=ucx_installed, has_secret=has_secret)
        assert choice.names == names and reason in choice.reason


def test_what_was_asked_for_is_taken() -> None:
    choice = choose_connectors("ucx,redis", host="127.0.0.1", ucx_installed=False, has_secret=False)
    assert choice.names == ("ucx", "redis")
    assert is_ucx_installed(), "the tests need it"


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
def test_what_can_not_work_is_said(value: str, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        parse_connectors(value)
    with pytest.raises(ValidationError, match=complaint):
        NodeSettings.model_validate({"model": "m", "connector": value})


def test_spaces_do_not_matter() -> None:
    assert NodeSettings.model_validate({"model": "m", "connector": "ucx, redis"}).connector == "ucx,redis"


def test_nodes_that_share_a_connector_can_exchange() -> None:
    assert can_exchange("shared_memory,ucx", "ucx,redis") and can_exchange("redis", "redis")
    assert not can_exchange("shared_memory", "ucx,redis")


def test_the_prefill_rate_follows_the_engine() -> None:
    rate = PrefillRate()
    assert rate.seconds(100) is None
    rate.observe(load(0, 0.0))
    assert rate.seconds(100) is None
    rate.observe(load(1000, 2.0))
    assert rate.seconds(100) == pytest.approx(0.2)
    rate.observe(load(1000, 2.0))  # nothing new
    assert rate.seconds(100) == pytest.approx(0.2)
    rate.observe(load(3000, 3.0))
    assert rate.seconds(100) == pytest.approx(100 / 800)


def load(num_prefilled_tokens: int, prefill_seconds: float) -> EngineLoad:
    return EngineLoad(0, 0, 0, 0, 8, 8, 0, 0, 0, num_prefilled_tokens, prefill_seconds)
