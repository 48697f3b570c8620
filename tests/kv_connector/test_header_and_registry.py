"""The header's bytes and its checks; backends by name, and what importing them costs."""

import subprocess
import sys
from dataclasses import replace

import pytest

from kv_connector.header import HEADER_BYTES, BlockHeader, Mismatch, layout_digest, payload_digest
from kv_connector.registry import create_connector
from kv_connector.settings import ConnectorSettings, UcxSettings
from kvrelay.core.block_hash import BlockHash
from kvrelay.core.connectors import CONNECTORS
from kvrelay.core.errors import ConfigurationError
from tests.kv_connector.backends import CLUSTER_SECRET, LAYOUT

NAME = BlockHash(bytes(range(32)))
HEADER = BlockHeader(NAME, layout_digest(LAYOUT), 1 << 40, 16, 2**64 - 1, payload_digest(b"payload"))


def test_encoding_is_fixed() -> None:
    data = HEADER.encode()
    assert len(data) == HEADER_BYTES == 96
    assert data[:40] == b"KVRB\x01\0\0\0" + NAME
    assert data[56:80] == (1 << 40).to_bytes(8, "little") + b"\x10" + bytes(7) + b"\xff" * 8
    assert BlockHeader.decode(data) == HEADER


@pytest.mark.parametrize(
    ("damaged", "expected"),
    [
        (HEADER, None),
        (replace(HEADER, magic=b"RIFF"), Mismatch.VERSION),
        (replace(HEADER, version=2), Mismatch.VERSION),
        (replace(HEADER, block_hash=BlockHash(bytes(32))), Mismatch.HASH),
        (replace(HEADER, layout_digest=bytes(16)), Mismatch.LAYOUT),
        (replace(HEADER, payload_bytes=1), Mismatch.LENGTH),
        (replace(HEADER, num_tokens=15), Mismatch.TOKENS),
        (replace(HEADER, epoch=1), Mismatch.EPOCH),
    ],
)
def test_verify_names_the_field(damaged: BlockHeader, expected: Mismatch | None) -> None:
    def verify(epoch: int | None) -> Mismatch | None:
        return damaged.verify(
            block_hash=NAME, layout_digest=layout_digest(LAYOUT), payload_bytes=1 << 40, num_tokens=16, epoch=epoch
        )

    assert verify(2**64 - 1) is expected
    assert verify(None) is (None if expected is Mismatch.EPOCH else expected)


def test_verify_payload() -> None:
    assert HEADER.verify_payload(payload_digest(b"payload")) is None
    assert HEADER.verify_payload(payload_digest(b"Payload")) is Mismatch.DIGEST


def test_backends_by_name() -> None:
    settings = ConnectorSettings(ucx=UcxSettings(CLUSTER_SECRET))
    names = tuple(create_connector(name, settings).name for name in CONNECTORS)
    assert names == CONNECTORS, "what settings accept can be made"
    with pytest.raises(ConfigurationError, match="'rdma'; there are: shared_memory, ucx, redis"):
        create_connector("rdma")


def test_a_missing_library_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "kv_connector.store.redis_store", raising=False)
    for module in [name for name in sys.modules if name.partition(".")[0] == "redis"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'kvrelay\[redis\]'"):
        create_connector("redis")


def test_importing_loads_no_backend() -> None:
    code = (
        "import sys, kv_connector, kv_connector.registry as r; r.create_connector('shared_memory');"
        "sys.exit(any(m.partition('.')[0] in ('redis', 'ucxx', 'torch') for m in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
