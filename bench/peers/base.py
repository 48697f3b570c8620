"""What a peer is: how to install it, and how to have it serve a model."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class Server:
    """One that answers. All of its processes descend from `processes`."""

    url: str
    model: str
    processes: tuple[int, ...]
    ready_seconds: float
    prompt_format: Literal["token_ids", "text"] = "token_ids"


class Peer(Protocol):
    """`directory` is the peer's own: its environment, its logs."""

    @property
    def name(self) -> str: ...

    def install(self, directory: Path) -> None:
        """Does nothing where it is installed already. Raises PeerError."""
        ...

    def serve(self, directory: Path, model: Path) -> AbstractContextManager[Server]:
        """Until the context ends. Raises PeerError when it ends before it answers, or does not answer in time."""
        ...


class PeerError(Exception):
    """A peer that can not be installed or does not serve; the message says what to look at."""
