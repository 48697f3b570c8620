"""Settings of the connectors. Importing this loads no backend."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any, get_type_hints

from kv_connector.pool import CopyRows, copy_rows


@dataclass(frozen=True, slots=True)
class SharedMemorySettings:
    """`directory`: where segments are created, the same for every node of a host; None means /dev/shm, or the system's
    temporary directory where that does not exist."""

    directory: str | None = None


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """`url`: redis://, rediss:// (TLS) or unix://; it may hold a password and is kept out of repr and logs.
    `ttl_seconds`: how long a block stays after it was last published. `batch_bytes`: payload in flight per round trip.
    `operation_timeout_seconds`: limit for one round trip. `key_prefix`: keys are `<prefix>:<block hash in hex>`."""

    url: str = field(default="redis://127.0.0.1:6379/0", repr=False)
    ttl_seconds: int = 3600
    batch_bytes: int = 1 << 20
    operation_timeout_seconds: float = 2.0
    key_prefix: str = "kvrelay"
    max_connections: int = 8


@dataclass(frozen=True, slots=True)
class UcxSettings:
    """`host`: IPv4 address or name under which peers reach this node. `cluster_secret`: known to every node of the
    cluster and to nobody else; it is never sent. `net_devices`: which network devices UCX may use (its
    UCX_NET_DEVICES); empty means all."""

    cluster_secret: str = field(default="", repr=False)
    host: str = "127.0.0.1"
    net_devices: str = ""


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """One branch of plain values per backend; only that of the backend in use is read. `copy`: how blocks are copied
    out of a peer's host memory."""

    shared_memory: SharedMemorySettings = field(default_factory=SharedMemorySettings)
    redis: RedisSettings = field(default_factory=RedisSettings)
    ucx: UcxSettings = field(default_factory=UcxSettings)
    copy: CopyRows = copy_rows

    def plain(self) -> dict[str, dict[str, Any]]:
        """Returns every branch as a dictionary for `from_plain`. Secrets are in it."""
        return {name: asdict(getattr(self, name)) for name in _branch_types()}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Mapping[str, Any]]) -> "ConnectorSettings":
        """Returns settings with the branches of another process, and this one's `copy`."""
        return cls(**{name: branch(**plain[name]) for name, branch in _branch_types().items()})


def _branch_types() -> dict[str, Any]:
    return {name: hint for name, hint in get_type_hints(ConnectorSettings).items() if is_dataclass(hint)}
