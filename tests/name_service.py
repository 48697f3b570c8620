"""Names of hosts that have the addresses which a test gives them, in this process."""

import socket
from typing import Any

import pytest


def give_addresses(monkeypatch: pytest.MonkeyPatch, name: str, *addresses: str) -> None:
    """Gives a name these addresses, as the name service of a machine would tell."""
    resolve = socket.getaddrinfo

    def resolve_name(host: str, port: int, **given: Any) -> list[Any]:
        return [found for address in addresses for found in resolve(address if host == name else host, port, **given)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve_name)
