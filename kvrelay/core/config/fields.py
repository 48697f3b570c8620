"""What a field of a process's settings is, by its annotation: an argument or a flag, a list, a secret."""

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo

ENV_PREFIX = "KVRELAY_"


class Verbatim:
    """A mark on a list of texts, `Annotated[tuple[str, ...], Verbatim()]`: each flag of that name is one item, with its
    commas and blanks, and so is the variable."""


@dataclass(frozen=True, slots=True)
class Placeholder:
    """A mark on a type, `Annotated[tuple[str, ...], Placeholder("METRIC=MS")]`: what stands for a value in `--help`."""

    text: str


def flag_of(name: str) -> str:
    """Returns the flag of a setting: `--block-size` for `block_size`."""
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    """Returns the variable of the environment that gives a setting: `KVRELAY_BLOCK_SIZE` for `block_size`."""
    return ENV_PREFIX + name.upper()


def argument_of(name: str, field: FieldInfo) -> str:
    """Returns how a command line has the setting: by its flag, or `MODEL` for an argument without one."""
    return name.upper() if is_positional(field) else flag_of(name)


def is_positional(field: FieldInfo) -> bool:
    return any(getattr(item, "__name__", "") == "_CliPositionalArg" for item in field.metadata)


def is_list(field: FieldInfo) -> bool:
    return any(get_origin(member) in (list, tuple) for member in _members(field.annotation))


def is_secret(field: FieldInfo) -> bool:
    return SecretStr in _members(field.annotation)


def is_number(field: FieldInfo) -> bool:
    """Tells whether a setting may be a number, or a list of numbers."""
    return any(found in (int, float) for found in _types(field.annotation))


def is_verbatim(field: FieldInfo) -> bool:
    return any(isinstance(item, Verbatim) for item in field.metadata)


def placeholder_of(field: FieldInfo) -> str | None:
    """Returns what stands for a value in `--help`, None if the type says enough."""
    marks = [item.text for item in field.metadata if isinstance(item, Placeholder)]
    return marks[0] if marks else "TEXT" if is_verbatim(field) else None


def items_of(value: str, field: FieldInfo) -> list[str]:
    """Cuts the text of a list into its items."""
    return [value] if is_verbatim(field) else [item.strip() for item in value.split(",") if item.strip()]


def _types(annotation: Any) -> Iterator[Any]:
    """Yields the types that an annotation allows, and in place of a list those of its items."""
    for member in _members(annotation):
        if get_origin(member) in (list, tuple, Annotated):
            yield from _types(get_args(member)[0])
        else:
            yield member


def _members(annotation: Any) -> tuple[Any, ...]:
    """Returns the members of a union, or the annotation itself if it is none."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)
