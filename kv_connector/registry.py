"""The backends by name, and what the rest of the code has to know of each.

Invariant: a backend's module, and the library it needs, are imported when the backend is created and not before.
"""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from kv_connector.base import HostConnector
from kv_connector.device.base import DeviceConnector
from kv_connector.settings import ConnectorSettings
from kv_connector.ucx.environment import prepare_ucx_environment
from kvrelay.core.errors import ConfigurationError

if TYPE_CHECKING:
    from kv_connector.ucx.connector import UcxConnector

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DirectSpec:
    """The connector, called `name`, that does for pools in device memory what a backend does for those on the host."""

    name: str
    make: Callable[[ConnectorSettings], DeviceConnector]


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """A backend. `make` imports and creates it. `remedy`: what a user can do when it fails its self-test.

    `library`: the package that it imports, which our extra called `extra` installs. `is_store`: it keeps blocks in a
    store that all nodes share, which may be away for a while. `direct`: None when its blocks pass through host memory
    always."""

    name: str
    make: Callable[[ConnectorSettings], HostConnector]
    remedy: str
    library: str = ""
    extra: str = ""
    is_store: bool = False
    direct: DirectSpec | None = None


def _shared_memory(settings: ConnectorSettings) -> HostConnector:
    from kv_connector.segments.shared_memory import SharedMemoryConnector

    return SharedMemoryConnector(settings.shared_memory, copy=settings.copy)


def _cuda_ipc(settings: ConnectorSettings) -> DeviceConnector:
    from kv_connector.device.cuda_ipc import CudaIpcConnector

    return CudaIpcConnector(settings.shared_memory)


def _ucx(settings: ConnectorSettings) -> "UcxConnector":
    prepare_ucx_environment()
    from kv_connector.ucx.connector import UcxConnector

    return UcxConnector(settings.ucx)


def _redis(settings: ConnectorSettings) -> HostConnector:
    from kv_connector.store.redis_store import RedisConnector

    return RedisConnector(settings.redis)


_SPECS = (
    BackendSpec(
        name="shared_memory",
        make=_shared_memory,
        remedy="set --shared-memory-dir to a directory in memory with room, or another --connector",
        direct=DirectSpec("cuda_ipc", _cuda_ipc),
    ),
    BackendSpec(
        name="ucx",
        make=_ucx,
        remedy="set --ucx-host to an address that a network interface here has, --ucx-net-devices to devices that "
        "reach it, or another --connector",
        library="ucxx",
        extra="ucx",
        direct=DirectSpec("ucx", _ucx),
    ),
    BackendSpec(
        name="redis",
        make=_redis,
        remedy="check the way from this node to --redis-url, or set another --connector",
        library="redis",
        extra="redis",
        is_store=True,
    ),
)
BACKENDS: Mapping[str, BackendSpec] = MappingProxyType({spec.name: spec for spec in _SPECS})
_OF_DIRECT: Mapping[str, BackendSpec] = MappingProxyType({spec.direct.name: spec for spec in _SPECS if spec.direct})


def create_connector(name: str, settings: ConnectorSettings) -> HostConnector:
    """Returns the backend called `name`, not yet allocated. Raises ConfigurationError for an unknown name or a missing
    library."""
    spec = _find(BACKENDS, name)
    return _create(spec, spec.make, settings)


def create_direct(name: str, settings: ConnectorSettings) -> DeviceConnector:
    """Returns the connector over device memory called `name` (see `DirectSpec`), not serving yet. Raises like
    `create_connector`."""
    spec = _find(_OF_DIRECT, name)
    assert spec.direct is not None
    return _create(spec, spec.direct.make, settings)


def direct_name(name: str) -> str | None:
    """Returns the name of the connector that does for device memory what the backend `name` does for the host's; None
    when there is none."""
    direct = BACKENDS[name].direct
    return None if direct is None else direct.name


def is_installed(name: str) -> bool:
    """Tells whether the library of the backend `name` can be imported."""
    library = BACKENDS[name].library
    return not library or importlib.util.find_spec(library) is not None


def _find(specs: Mapping[str, BackendSpec], name: str) -> BackendSpec:
    spec = specs.get(name)
    if spec is None:
        raise ConfigurationError(f"unknown connector {name!r}; there are: {', '.join(specs)}")
    return spec


def _create(spec: BackendSpec, make: Callable[[ConnectorSettings], T], settings: ConnectorSettings) -> T:
    try:
        return make(settings)
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module != spec.library:
            raise
        raise ConfigurationError(
            f"connector {spec.name!r} needs the package {module!r}: pip install 'kvrelay[{spec.extra}]'"
        ) from error
