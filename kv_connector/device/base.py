"""The seam of the connectors that move blocks of a pool in device memory without passing through the host."""

from typing import Protocol

from kv_connector.base import KVConnector
from kv_connector.device.pool import DevicePool


class DeviceConnector(KVConnector, Protocol):
    """A backend for a pool on a device. Call `serve` first, exactly once."""

    def serve(self, pool: DevicePool, *, node_id: str, epoch: int) -> None:
        """Serves from the pool, which outlives this connector. Raises ConfigurationError or KVError when that does not
        work on this machine."""
        ...
