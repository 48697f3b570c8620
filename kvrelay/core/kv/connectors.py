"""Names of connectors in settings and between processes: `auto`, one name, or several in the order of trying; and
which of them stay within a host.

Values only: the connectors themselves are in `kv_connector`, which the router and the command line do not import.
"""

from typing import Annotated

from pydantic import AfterValidator

from kvrelay.core.errors import ConfigurationError

AUTO = "auto"
CONNECTORS = ("shared_memory", "ucx", "redis")
"""The connectors, in the only order in which they can be combined: shared memory comes first because it has to provide
the pool's memory, and the store comes last because it is for blocks whose holders cannot be reached."""

_BETWEEN_DEVICES = frozenset({"cuda_ipc"})  # which stands for shared_memory where pools are on GPUs
_OF_ONE_HOST = frozenset({"shared_memory", *_BETWEEN_DEVICES})


def parse_connectors(value: str) -> tuple[str, ...]:
    """Returns the connectors of a list such as "shared_memory,redis", or ("auto",). Raises ConfigurationError if the
    list cannot work."""
    names = tuple(name.strip() for name in value.split(","))
    if names == (AUTO,):
        return names
    for name in names:
        if name == AUTO:
            raise ConfigurationError("'auto' stands alone: it picks the connectors itself")
        if name not in CONNECTORS:
            raise ConfigurationError(f"unknown connector {name!r}; there are: {AUTO}, {', '.join(CONNECTORS)}")
        if names.count(name) > 1:
            raise ConfigurationError(f"connector {name!r} is listed twice")
    ordered = tuple(name for name in CONNECTORS if name in names)
    if names != ordered:
        raise ConfigurationError(f"connectors are tried in the order listed, and only {','.join(ordered)} works")
    return names


def needs_same_host(name: str) -> bool:
    """Tells whether the connector called `name`, over host or device memory, reaches only nodes of its own host."""
    return name in _OF_ONE_HOST


def is_between_devices(name: str) -> bool:
    """Tells whether only nodes that move KV from device to device have the connector called `name`."""
    return name in _BETWEEN_DEVICES


def _checked(value: str) -> str:
    try:
        return ",".join(parse_connectors(value))
    except ConfigurationError as error:
        raise ValueError(str(error)) from error


ConnectorSetting = Annotated[str, AfterValidator(_checked)]
"""The type of a setting whose value `parse_connectors` accepts."""
