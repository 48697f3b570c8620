"""The endpoint string of a node with tiers: strict in both directions, since it comes from peers."""

import pytest

from kvrelay.core.errors import ConfigurationError, KVError
from kvrelay.core.kv.endpoints import Endpoints, parse_endpoints, this_host


def test_encoded_endpoints_parse_to_the_same() -> None:
    given = Endpoints(this_host(), {"shared_memory": "kvrelay-a-0000000000000001.kv", "ucx": "10.0.0.2:4711"})
    assert parse_endpoints(given.encode()) == given
    assert parse_endpoints(Endpoints(this_host(), {}).encode()).by_name == {}
    with pytest.raises(ConfigurationError, match="cannot be reached"):
        Endpoints(this_host(), {"ucx": "a;b"}).encode()


@pytest.mark.parametrize(
    "text",
    [
        *("", "ucx=1", "host=;ucx=1", "host=0123456789abcdeg", "host=0123456789abcdef;", "host=0123456789abcdef;ucx"),
        "host=0123456789abcdef0;ucx=1",
        "host=0123456789abcdef;ucx=1;ucx=2",
        "host=0123456789abcdef;ucx=a b",
        "host=0123456789abcdef;ucx=" + "x" * 2000,
    ],
)
def test_a_malformed_endpoint_raises(text: str) -> None:
    with pytest.raises(KVError):
        parse_endpoints(text)
