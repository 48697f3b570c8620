"""What is said when nothing can listen at an address."""

import errno
import os
import socket

import pytest

from kvrelay.core.errors import ConfigurationError
from kvrelay.core.process.listening import address_of, bound_socket, check_port, is_loopback, numeric_address
from tests.name_service import give_addresses


def test_a_free_port_is_bound_and_left_free_by_a_check() -> None:
    with bound_socket("127.0.0.1", 0, flag="--port") as bound:
        port = bound.getsockname()[1]
    check_port("127.0.0.1", port, flag="--port")
    with socket.socket() as other:  # which does not share a port, as ours would
        other.bind(("127.0.0.1", port))


def test_a_port_whose_last_connections_are_still_being_closed_is_free() -> None:
    """As after a restart."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            server.accept()[0].close()  # the side that closes first keeps the port for a minute
            assert client.recv(1) == b""
    check_port("127.0.0.1", port, flag="--port")


def test_a_taken_port_is_named_with_the_flag_that_changes_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"127.0.0.1:{port}: Address already in use; .*--grpc-port"):
            check_port("127.0.0.1", port, flag="--grpc-port")


def test_a_server_on_an_ipv6_wildcard_takes_ipv4_too() -> None:
    """As gRPC has it: with `host: "::"` both servers of a router are reached in the same ways. The wildcard itself
    cannot be bound where a container has no IPv6, but an address of IPv4 as IPv6 writes it can."""
    with bound_socket("::ffff:127.0.0.1", 0, flag="--port") as bound:
        bound.listen()
        with socket.create_connection(("127.0.0.1", bound.getsockname()[1]), timeout=10):
            pass


def test_an_ipv6_address_stands_in_brackets() -> None:
    assert address_of("127.0.0.1", 8001) == "127.0.0.1:8001"
    assert address_of("::1", 8001) == "[::1]:8001"


def test_a_name_that_has_only_an_ipv6_address_is_listened_on(monkeypatch: pytest.MonkeyPatch) -> None:
    give_addresses(monkeypatch, "six.example", "::ffff:127.0.0.1")
    with bound_socket("six.example", 0, flag="--port") as bound:
        assert bound.family is socket.AF_INET6


def test_of_a_name_with_addresses_of_both_families_that_of_ipv4_is_listened_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `localhost` often has: clients that write 127.0.0.1 are to find the server."""
    give_addresses(monkeypatch, "both.example", "::1", "127.0.0.1")
    with bound_socket("both.example", 0, flag="--port") as bound:
        assert bound.getsockname()[0] == numeric_address("both.example") == "127.0.0.1"


def test_of_a_name_that_is_also_of_loopback_the_address_that_others_reach_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    give_addresses(monkeypatch, "here.example", "127.0.1.1", "fd00::2", "10.0.0.2")
    assert numeric_address("here.example") == "10.0.0.2"
    give_addresses(monkeypatch, "six.example", "127.0.1.1", "fd00::2")
    assert numeric_address("six.example") == "fd00::2"


def test_of_names_localhost_alone_is_known_to_be_loopback() -> None:
    hosts = ("localhost", "127.0.1.1", "::1", "here.example", "10.0.0.2", "::")
    assert [host for host in hosts if is_loopback(host)] == ["localhost", "127.0.1.1", "::1"]


def test_an_address_or_an_unknown_name_stands_for_itself() -> None:
    assert [numeric_address(host) for host in ("10.0.0.2", "::", "no such host")] == ["10.0.0.2", "::", "no such host"]


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host", "a..b"])
def test_a_foreign_address_is_told_from_a_taken_port(host: str) -> None:
    with pytest.raises(ConfigurationError, match=f"cannot listen on {host}:0: .*--host has to be an address of this"):
        check_port(host, 0, flag="--port")


def test_a_kernel_without_ipv6_is_told_like_an_address_of_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*arguments: object) -> None:
        raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))

    monkeypatch.setattr(socket, "socket", unsupported)
    with pytest.raises(ConfigurationError, match=r"cannot listen on \[::\]:80: .* not supported.*; --host has to be"):
        bound_socket("::", 80, flag="--port")
