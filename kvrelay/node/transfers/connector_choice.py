"""Chooses the connectors of a node: those that are set, or what `auto` stands for without those that fail their
self-test.

Invariants: a connector that moves wrong bytes is never chosen. Nodes with the same settings, libraries and machines
choose connectors that work together, or end: of two that tried at different moments, say before and after the network
was up, neither has stopped at what the other does not share. So a connector that has to work and does not ends the
start, with an error that names a remedy; a store is the exception, because it may come back, unless it refuses our
password.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from kv_connector.registry import BACKENDS
from kv_connector.self_test import SelfTestReport
from kvrelay.core.errors import ConfigurationError
from kvrelay.core.kv.connectors import AUTO, parse_connectors
from kvrelay.core.process.listening import is_loopback, numeric_address
from kvrelay.node.settings import NodeSettings

CheckConnector = Callable[[str], Awaitable[SelfTestReport]]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ConnectorChoice:
    """The names of the connectors in the order of asking, and for the log the reason."""

    names: tuple[str, ...]
    reason: str


def choose_connectors(
    value: str, *, host: str, ucx_installed: bool, has_secret: bool, broken: Mapping[str, str]
) -> ConnectorChoice:
    """Returns the connectors for a setting's `value`. `host`: where peers reach this node. `broken`: connectors that
    failed their self-test, and how. Raises ConfigurationError for a wrong value, and when none that works is left."""
    names = parse_connectors(value)
    if names != (AUTO,):
        return ConnectorChoice(_working(names, broken), "as set")
    if is_loopback(host):
        return ConnectorChoice(_working(("shared_memory",), broken), f"only this host reaches {host}")
    if ucx_installed and has_secret:
        shared_memory = () if "shared_memory" in broken else ("shared_memory",)
        return ConnectorChoice(
            (*shared_memory, *_working(("ucx",), broken)),
            "ucxx is installed and there is a cluster secret; peers of this host map the pool",
        )
    lacking = "there is no cluster secret" if ucx_installed else "ucxx is not installed"
    return ConnectorChoice(_working(("redis",), broken), f"no ucx: {lacking}")


async def choose_working(
    choose: Callable[[Mapping[str, str]], ConnectorChoice], check: CheckConnector
) -> ConnectorChoice:
    """Returns the first choice of which every connector has passed `check`. `choose` gets the connectors that have
    not, and why."""
    broken: dict[str, str] = {}
    passed: set[str] = set()
    while True:
        choice = choose(broken)
        untested = [name for name in choice.names if name not in passed]
        if not untested:
            return choice
        name = untested[0]
        report = await check(name)
        if not report.problem:
            _logger.info("connector %s: self-test passed, %.2f GB/s", name, report.bytes_per_second / 1e9)
            passed.add(name)
        elif BACKENDS[name].is_store and not (report.is_wrong or report.is_denied):
            _logger.warning("connector %s does not work now and is tried again later: %s", name, report.problem)
            passed.add(name)
        else:
            _logger.warning("connector %s: self-test failed: %s", name, report.problem)
            broken[name] = report.problem


def log_choice(choice: ConnectorChoice, settings: NodeSettings) -> None:
    """Logs the connectors and the reason and, of Redis, which one, since nodes have to share it. Warns if it is that of
    this machine only because nobody has said which, and nodes of others have theirs."""
    store = ""
    if "redis" in choice.names:
        from kv_connector.store.redis_address import redis_address

        store = f"; the store is at {redis_address(settings.redis_url.get_secret_value())}"
    _logger.info("connector %s: %s%s", ",".join(choice.names), choice.reason, store)
    if store and "redis_url" not in settings.model_fields_set and not is_loopback(numeric_address(settings.host)):
        _logger.warning(
            "KVRELAY_REDIS_URL is not set: this node has the Redis of its own machine, in which nodes of other "
            "machines neither find blocks nor leave any; set it to the same URL for all nodes"
        )


def _working(names: tuple[str, ...], broken: Mapping[str, str]) -> tuple[str, ...]:
    for name in names:
        if name in broken:
            raise ConfigurationError(
                f"connector {name!r} does not work on this machine: {broken[name]}; {BACKENDS[name].remedy}"
            )
    return names
