"""The YAML file of a process's settings. A name that no setting has, or that comes twice, is an error."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic.fields import FieldInfo

from kvrelay.core.config.fields import is_number
from kvrelay.core.config.problems import nearest
from kvrelay.core.errors import ConfigurationError

_NOT_DECIMAL = re.compile(r"[-+]?0[0-9a-z_]|.*:", re.IGNORECASE)  # octal, binary, hexadecimal, in sixtieths


def read_config_file(path: Path, fields: Mapping[str, FieldInfo]) -> dict[str, Any]:
    """Returns the settings in a file by name, dashes in names as underscores. `fields` are those that a file may set.
    Raises ConfigurationError, which says where the file is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
        loaded, root = yaml.safe_load(text), yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigurationError(f"--config: cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--config: {path} is not valid YAML{_place(error)}") from None
    except ValueError:  # whose words may quote the file, too
        raise ConfigurationError(
            f"--config: {path}: a value looks like a date or a number, but is none: if it is a text, write it in quotes"
        ) from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigurationError(f"--config: {path} must hold settings as `name: value`, not a {type(loaded).__name__}")
    if isinstance(root, yaml.MappingNode):
        _refuse_twice(root, path)
    values = {_name(key): value for key, value in loaded.items()}
    for name in values:
        if name not in fields:
            raise ConfigurationError(f"--config: {path}: there is no setting {name!r}{nearest(name, fields)}")
    if isinstance(root, yaml.MappingNode):
        for key, value in root.value:
            if (name := _name(key.value)) in fields and is_number(fields[name]):
                _refuse_odd_numbers(name, value, path)
    return values


def _name(key: object) -> str:
    return str(key).replace("-", "_")


def _refuse_twice(root: yaml.MappingNode, path: Path) -> None:
    """Raises ConfigurationError for a setting that a file has twice, which YAML itself forbids but the library takes,
    or once with dashes and once with underscores."""
    lines: dict[str, int] = {}
    for key, _ in root.value:
        name, line = _name(key.value), key.start_mark.line + 1
        if name in lines:
            raise ConfigurationError(
                f"--config: {path}: line {line} sets {name!r} again, after line {lines[name]}: remove one of them"
            )
        lines[name] = line


def _refuse_odd_numbers(name: str, value: yaml.Node, path: Path) -> None:
    """Raises ConfigurationError where a number, or one of a list, has a form in which YAML 1.1 sees something else than
    a person who writes it."""
    for node in value.value if isinstance(value, yaml.SequenceNode) else [value]:
        kind, text = node.tag.rpartition(":")[2], str(node.value)
        if kind == "bool" or (kind in ("int", "float") and _NOT_DECIMAL.match(text)):
            read = str(yaml.SafeLoader("").construct_object(node)).lower()
            raise ConfigurationError(
                f"--config: {path}: line {node.start_mark.line + 1}: {name} has to be a decimal number, not `{text}`"
                + ("" if read == text else f", which YAML reads as {read}")
            )


def _place(error: yaml.YAMLError | UnicodeDecodeError) -> str:
    """Returns where a file is wrong and what often is. The error's own words quote the file, which may hold secrets."""
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    if mark is None:
        return ": it has characters that are no text"
    often = "a line is `name: value`, without tabs, and a text with special characters has to be in quotes"
    return f" at line {mark.line + 1}, column {mark.column + 1}: {often}"
