"""What a peer is: how to install it, and how to have it serve a model."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

PromptFormat = Literal["token_ids", "text"]


@dataclass(frozen=True, slots=True)
class Server:
    """One that answers. All of its processes descend from this one."""

    url: str
    model: str
    ready_seconds: float
    takes_ignore_eos: bool = True
    keeps_connections: bool = True


class Engine(Protocol):
    """`directory` is the engine's own: its environment, its logs."""

    @property
    def name(self) -> str: ...

    def serve(self, directory: Path, model: Path) -> AbstractContextManager[Server]:
        """Until the context ends. Raises PeerError when it ends before it answers, or does not answer in time."""
        ...


class Peer(Engine, Protocol):
    @property
    def prompt_format(self) -> PromptFormat:
        """What it takes; kvrelay then gets the same."""
        ...

    def install(self, directory: Path) -> None:
        """Does nothing where it is installed already. Raises PeerError."""
        ...


class PeerError(Exception):
    """A peer that cannot be installed or does not serve; the message says what to look at."""
