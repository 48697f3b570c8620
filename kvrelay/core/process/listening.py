"""Sockets that servers listen on, their addresses, and what to say when there can be none."""

import errno
import socket

from kvrelay.core.errors import ConfigurationError


def bound_socket(host: str, port: int, *, flag: str) -> socket.socket:
    """Returns a socket at this address that does not listen yet; port 0 draws a free one. `flag` is the flag that sets
    the port. Raises ConfigurationError, which names the flag to change, when nothing can listen there."""
    try:
        bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:  # the kernel has no IPv6
        raise ConfigurationError(_reason(host, port, flag, error)) from error
    try:
        # A port whose last connections are still being closed is free.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if bound.family is socket.AF_INET6:  # "::" takes IPv4 as well, as gRPC has it
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise ConfigurationError(_reason(host, port, flag, error)) from error
    return bound


def address_of(host: str, port: int) -> str:
    """Returns `host:port` as clients take it: an IPv6 address stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_port(host: str, port: int, *, flag: str) -> None:
    """Raises ConfigurationError, which names the flag to change, when nothing can listen on the port now."""
    bound_socket(host, port, flag=flag).close()


def _reason(host: str, port: int, flag: str, error: OSError) -> str:
    if host.startswith("["):
        return f"cannot listen on {host}: --host takes an IPv6 address without brackets"
    about_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
    remedy = f"choose another port with {flag}" if about_port else "--host has to be an address of this machine"
    return f"cannot listen on {address_of(host, port)}: {error.strerror}; {remedy}"
