"""Sockets that servers listen on, their addresses, and what to say when there can be none."""

import errno
import ipaddress
import socket
from typing import Any

from kvrelay.core.errors import ConfigurationError


def bound_socket(host: str, port: int, *, flag: str) -> socket.socket:
    """Returns a socket at this address that does not listen yet; port 0 draws a free one. `flag` is the flag that sets
    the port. Raises ConfigurationError, which names the flag to change, when nothing can listen there."""
    try:
        family, address = _resolved(host, port)
        bound = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:  # there is no such name, or the kernel has no IPv6
        raise ConfigurationError(_reason(host, port, flag, error)) from error
    try:
        # A port whose last connections are still being closed is free.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if bound.family is socket.AF_INET6:  # "::" takes IPv4 as well, as gRPC has it
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ConfigurationError(_reason(host, port, flag, error)) from error
    return bound


def address_of(host: str, port: int) -> str:
    """Returns `host:port` as clients take it: an IPv6 address stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def numeric_address(host: str) -> str:
    """Returns the address that this machine knows a name by, or `host` itself if that is an address or unknown."""
    try:
        return str(_resolved(host, 0)[1][0])
    except OSError:
        return host


def is_loopback(host: str) -> bool:
    """Tells whether only this host reaches `host`, an address or `localhost`. Other names are not looked up: elsewhere
    they may have other addresses."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_port(host: str, port: int, *, flag: str) -> None:
    """Raises ConfigurationError, which names the flag to change, when nothing can listen on the port now."""
    bound_socket(host, port, flag=flag).close()


def _resolved(host: str, port: int) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """Returns the family of a host and its address as sockets take it. Of a name with several, it is one that other
    machines may reach, if there is one, and of these one of IPv4. Raises OSError for an unknown name."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except UnicodeError as error:  # a name that no host can have, such as "a..b"
        raise OSError(errno.EINVAL, "no host can have this name") from error
    family, *_, address = min(found, key=lambda one: (is_loopback(str(one[4][0])), one[0] is not socket.AF_INET))
    return family, address


def _reason(host: str, port: int, flag: str, error: OSError) -> str:
    about_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
    remedy = f"choose another port with {flag}" if about_port else "--host has to be an address of this machine"
    return f"cannot listen on {address_of(host, port)}: {error.strerror}; {remedy}"
