"""Dataclasses that are cheap to make, for values of which every token takes several."""

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def record(cls: type[T]) -> type[T]:
    """Makes a dataclass with slots that is frozen to type checkers only, and hashed by its fields as a frozen one is.
    Making one that is frozen at run time takes four times as long."""
    return dataclass(slots=True, unsafe_hash=True)(cls)
