"""Settings of the connectors. Importing this loads no backend."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from kv_connector.pool import CopyRows, copy_rows

LOOPBACK_DEVICE = "lo"


@dataclass(frozen=True, slots=True)
class SharedMemorySettings:
    """Settings of `shared_memory` and `cuda_ipc`. `directory`: where segments are created, the same for every node of a
    host; None means /dev/shm, or the system's temporary directory where that does not exist."""

    directory: str | None = None


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """Settings of `redis`. `url`: redis://, rediss:// (TLS) or unix://; it may hold a password and is kept out of repr
    and logs. `ttl_seconds`: how long a block stays after it was last published. `batch_bytes`: payload in flight per
    round trip. `operation_timeout_seconds`: limit for one round trip, from when it has a connection. `key_prefix`: keys
    are `<prefix>:<block hash in hex>`. `max_connections`: to the server at a time; further exchanges wait for one."""

    url: str = field(default="redis://127.0.0.1:6379/0", repr=False)
    ttl_seconds: int = 3600
    batch_bytes: int = 1 << 20
    operation_timeout_seconds: float = 2.0
    key_prefix: str = "kvrelay"
    max_connections: int = 8


@dataclass(frozen=True, slots=True)
class UcxSettings:
    """Settings of `ucx`. `host`: IPv4 address or name under which peers reach this node. `cluster_secret`: known to
    every node of the cluster and to nobody else; it is never sent. `net_devices`: which network devices UCX may use
    (its UCX_NET_DEVICES); empty means all, and LOOPBACK_DEVICE alone that other machines do not reach it."""

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
        return {"shared_memory": asdict(self.shared_memory), "redis": asdict(self.redis), "ucx": asdict(self.ucx)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Mapping[str, Any]]) -> "ConnectorSettings":
        """Returns settings with the branches of another process, and this one's `copy`."""
        return cls(
            SharedMemorySettings(**plain["shared_memory"]), RedisSettings(**plain["redis"]), UcxSettings(**plain["ucx"])
        )
