"""What `--connector auto` comes to on a node, and why. A pure function of facts about the node."""

import importlib.util
import ipaddress
from dataclasses import dataclass

from kvrelay.core.connectors import AUTO, parse_connectors


@dataclass(frozen=True, slots=True)
class ConnectorChoice:
    """`reason` is for the log."""

    names: tuple[str, ...]
    reason: str


def choose_connectors(value: str, *, host: str, ucx_installed: bool, has_secret: bool) -> ConnectorChoice:
    """`value` as in the settings, `host`: where peers reach this node. Raises ConfigurationError for a wrong value."""
    names = parse_connectors(value)
    if names != (AUTO,):
        return ConnectorChoice(names, "as set")
    if _is_loopback(host):
        return ConnectorChoice(("shared_memory",), f"only this host reaches {host}")
    if ucx_installed and has_secret:
        return ConnectorChoice(
            ("shared_memory", "ucx"), "ucxx is installed and there is a cluster secret; peers of this host map the pool"
        )
    lacking = "ucxx is not installed" if not ucx_installed else "there is no cluster secret"
    return ConnectorChoice(("redis",), f"no ucx: {lacking}")


def is_ucx_installed() -> bool:
    return importlib.util.find_spec("ucxx") is not None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
