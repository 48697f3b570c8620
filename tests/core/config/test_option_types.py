"""Which texts are addresses of gRPC servers."""

import pytest
from pydantic import TypeAdapter, ValidationError

from kvrelay.core.config.option_types import HostPort

ADDRESS: TypeAdapter[str] = TypeAdapter(HostPort)


@pytest.mark.parametrize("address", ["10.0.0.3:1", "decode-0.nodes:65535", "[::1]:7000"])
def test_a_host_and_a_port_are_an_address(address: str) -> None:
    assert ADDRESS.validate_python(address) == address


@pytest.mark.parametrize("address", ["h:0", "h:65536", "h:-1", "h:", ":7000", "h", "::1:7000", "[::1:7000", "h/p:7000"])
def test_anything_else_is_none(address: str) -> None:
    with pytest.raises(ValidationError, match="host:port"):
        ADDRESS.validate_python(address)
