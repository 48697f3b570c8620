"""Backends by name. A backend's module, and the library it needs, are imported when the backend is asked for and not
before.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from kv_connector.base import HostConnector
from kv_connector.cost_gate import RecomputeSeconds
from kv_connector.device.base import DeviceConnector
from kv_connector.settings import ConnectorSettings
from kv_connector.tiered import TieredConnector
from kv_connector.ucx.environment import prepare_ucx_environment
from kvrelay.core.errors import ConfigurationError


def _shared_memory(settings: ConnectorSettings) -> HostConnector:
    from kv_connector.segments.shared_memory import SharedMemoryConnector

    return SharedMemoryConnector(settings.shared_memory)


def _redis(settings: ConnectorSettings) -> HostConnector:
    from kv_connector.store.redis_store import RedisConnector

    return RedisConnector(settings.redis)


def _ucx(settings: ConnectorSettings) -> HostConnector:
    prepare_ucx_environment()
    from kv_connector.ucx.connector import UcxConnector

    return UcxConnector(settings.ucx)


_FACTORIES: Mapping[str, Callable[[ConnectorSettings], HostConnector]] = MappingProxyType(
    {"shared_memory": _shared_memory, "ucx": _ucx, "redis": _redis}
)
# How the holder's connectors move what is in device memory without the host.
_DIRECT: Mapping[str, str] = MappingProxyType({"shared_memory": "cuda_ipc", "ucx": "ucx"})
# Top-level module -> our extra that installs it.
_EXTRAS: Mapping[str, str] = MappingProxyType({"redis": "redis", "ucxx": "ucx"})


def create_connector(name: str, settings: ConnectorSettings | None = None) -> HostConnector:
    """The backend called `name`, not yet allocated. Raises ConfigurationError for an unknown name or a missing
    library.
    """
    factory = _FACTORIES.get(name)
    if factory is None:
        raise ConfigurationError(f"unknown connector {name!r}; there are: {', '.join(_FACTORIES)}")
    try:
        return factory(settings or ConnectorSettings())
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in _EXTRAS:
            raise
        raise ConfigurationError(
            f"connector {name!r} needs the package {module!r}: pip install 'kvrelay[{_EXTRAS[module]}]'"
        ) from error


def create_tiers(
    names: Sequence[str], settings: ConnectorSettings, *, recompute_seconds: RecomputeSeconds = lambda num_tokens: None
) -> TieredConnector[HostConnector]:
    """What a node runs on: one backend or more, in the order of asking. A node of one tier has them too, so that
    nodes with different ones understand each other. Raises as `create_connector` does."""
    return TieredConnector([create_connector(name, settings) for name in names], recompute_seconds=recompute_seconds)


def direct_name(name: str) -> str | None:
    """The connector that does for pools in device memory what the backend `name` does for those on the host; None when
    there is none."""
    return _DIRECT.get(name)


def create_direct(name: str, settings: ConnectorSettings) -> DeviceConnector:
    """What `direct_name` names, not serving yet. Raises as `create_connector` does."""
    if name == "cuda_ipc":
        from kv_connector.device.cuda_ipc import CudaIpcConnector

        return CudaIpcConnector(settings.shared_memory)
    assert name == "ucx"
    prepare_ucx_environment()
    from kv_connector.ucx.connector import UcxConnector

    return UcxConnector(settings.ucx)
