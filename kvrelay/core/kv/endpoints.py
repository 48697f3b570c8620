"""The endpoint of a node with tiers: those of its connectors in one string, with its host.

    host=<16 hex digits>;shared_memory=kvrelay-prefill-0-....kv;ucx=10.0.0.2:41233

It comes from peers and is parsed strictly: bounded length, known shape, no name twice.
"""

import hashlib
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvrelay.core.errors import ConfigurationError, KVError

_MAX_LENGTH = 1024
_PART = re.compile(r"([a-z_]{1,32})=([!-:<-~]+)")  # printable, no space, no semicolon
_HOST = "host"
_HOST_ID = re.compile(r"[0-9a-f]{16}")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def this_host() -> str:
    """Returns 16 hex digits that identify this machine until it reboots (by its name, where there is no boot id)."""
    fact = _BOOT_ID.read_text() if _BOOT_ID.is_file() else socket.gethostname()
    return hashlib.sha256(f"kvrelay host {fact.strip()}".encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Endpoints:
    """A node's host, and its endpoint `by_name` of the connector."""

    host: str
    by_name: Mapping[str, str]

    def encode(self) -> str:
        """Returns the string. Raises ConfigurationError when an endpoint contains a character that is not allowed."""
        text = ";".join(f"{name}={endpoint}" for name, endpoint in {_HOST: self.host, **self.by_name}.items())
        try:
            parse_endpoints(text)
        except KVError as error:
            raise ConfigurationError(f"this node cannot be reached at {text!r}: {error}") from error
        return text


def parse_endpoints(text: str) -> Endpoints:
    """Parses a peer's endpoint. Raises KVError when it has another shape."""
    if len(text) > _MAX_LENGTH:
        raise KVError(f"an endpoint of {len(text)} characters")
    found: dict[str, str] = {}
    for part in text.split(";"):
        match = _PART.fullmatch(part)
        if match is None or match[1] in found:
            raise KVError(f"not an endpoint: {text!r}")
        found[match[1]] = match[2]
    host = found.pop(_HOST, "")
    if not _HOST_ID.fullmatch(host):
        raise KVError(f"an endpoint that names no host: {text!r}")
    return Endpoints(host, found)
