"""Which texts are addresses of gRPC servers, and which are hosts to listen on."""

import pytest
from pydantic import TypeAdapter, ValidationError

from kvrelay.cli.serve import ServeSettings
from kvrelay.core.config.option_types import Host, HostPort
from kvrelay.core.config.settings import ProcessSettings
from kvrelay.node.settings import NodeSettings
from router.settings import RouterSettings

ADDRESS: TypeAdapter[str] = TypeAdapter(HostPort)
HOST: TypeAdapter[str] = TypeAdapter(Host)


@pytest.mark.parametrize("address", ["10.0.0.3:1", "decode-0.nodes:65535", "[::1]:7000"])
def test_a_host_and_a_port_are_an_address(address: str) -> None:
    assert ADDRESS.validate_python(address) == address


@pytest.mark.parametrize(
    "address", ["h:0", "h:65536", "h:-1", "h:\u0663", "h:", ":7000", "h", "::1:7000", "[::1:7000", "h/p:7000"]
)
def test_anything_else_is_none(address: str) -> None:
    with pytest.raises(ValidationError, match="host:port"):
        ADDRESS.validate_python(address)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::", "fd00::3", "node-7.example", "1.example", "localhost"])
def test_an_address_or_a_name_is_a_host(host: str) -> None:
    assert HOST.validate_python(host) == host


@pytest.mark.parametrize("host", ["", "[::1]", "127.1", "10.0.0", "010.0.0.1", "1"])
def test_what_python_and_grpc_do_not_both_listen_on_is_no_host(host: str) -> None:
    with pytest.raises(ValidationError, match=r"must be an address of this machine, such as .* .without brackets"):
        HOST.validate_python(host)


@pytest.mark.parametrize("settings", [NodeSettings, RouterSettings, ServeSettings])
def test_every_server_takes_a_host_to_listen_on(settings: type[ProcessSettings]) -> None:
    with pytest.raises(ValidationError, match="must be an address of this machine"):
        settings.model_validate({"model": "m", "host": ""})
