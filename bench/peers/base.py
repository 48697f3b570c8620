"""The seam to a peer: how it is installed, and how it serves a model."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

PromptFormat = Literal["token_ids", "text"]


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers. All of its processes descend from this one."""

    url: str
    model: str
    ready_seconds: float
    takes_ignore_eos: bool = True
    keeps_connections: bool = True


@dataclass(frozen=True, slots=True)
class Setup:
    """What a result has to say about a peer: the packages it was installed from, and the options and variables
    (NAME=value) that it runs with, without paths and ports."""

    requirements: tuple[str, ...]
    options: tuple[str, ...]


class Engine(Protocol):
    """A server program. `directory` is the engine's own, with its environment and its logs."""

    @property
    def name(self) -> str: ...

    def serve(self, directory: Path, model: Path) -> AbstractContextManager[Server]:
        """Serves until the context ends. Raises PeerError when the server ends before it answers, or does not answer
        in time."""
        ...


class Peer(Engine, Protocol):
    @property
    def prompt_format(self) -> PromptFormat:
        """Returns the form of prompts that the peer takes; kvrelay then gets the same."""
        ...

    @property
    def setup(self) -> Setup: ...

    def install(self, directory: Path) -> None:
        """Installs the peer, unless it is installed already. Raises PeerError."""
        ...


class PeerError(Exception):
    """A peer cannot be installed, does not serve, or does other work than kvrelay. The message says what to look at."""
