"""How connectors are written in settings and between processes: `auto`, one name, or several in the order of trying.

Pure values; what a connector is belongs to `kv_connector`, which the router and the command line do without.
"""

from typing import Annotated

from pydantic import AfterValidator

from kvrelay.core.errors import ConfigurationError

AUTO = "auto"
CONNECTORS = ("shared_memory", "ucx", "redis")
"""In the only order in which they compose: the pool must be in shared memory for others to map it, and what is left
when no holder can be reached is the store."""


def parse_connectors(value: str) -> tuple[str, ...]:
    """The connectors of "shared_memory,redis", or ("auto",). Raises ConfigurationError that says what is wrong."""
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


def can_exchange(one: str, other: str) -> bool:
    """Whether nodes with these connectors (as they describe themselves) have a way to pass blocks to each other."""
    return not set(one.split(",")).isdisjoint(other.split(","))


def _checked(value: str) -> str:
    try:
        return ",".join(parse_connectors(value))
    except ConfigurationError as error:
        raise ValueError(str(error)) from error


ConnectorSetting = Annotated[str, AfterValidator(_checked)]
"""A setting's type: what `parse_connectors` takes."""
