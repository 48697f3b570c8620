"""kvrelay itself, as `kvrelay serve` starts it: our side of every comparison, and, with one node that does both prefill
and decode, the other side of a comparison that says what prefill nodes bring."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.local_cluster import local_cluster
from bench.peers.base import PromptFormat, Server, Setup
from bench.topology import Topology


@dataclass(frozen=True, slots=True)
class Kvrelay:
    """A cluster under `kvrelay serve`. `arguments` are further ones of that command."""

    topology: Topology
    arguments: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"kvrelay {self.topology}"

    @contextmanager
    def serve(self, directory: Path, model: Path) -> Iterator[Server]:
        arguments = [*self.topology.arguments, "--log-level", "warning", *self.arguments]
        started = time.monotonic()
        with local_cluster(str(model), arguments) as address:
            yield Server(f"http://{address.http}", address.model, time.monotonic() - started)


@dataclass(frozen=True, slots=True)
class KvrelayAggregated:
    """The peer that kvrelay is to itself: the same checkout with one decode node, which computes all prompts."""

    name: str = "kvrelay-aggregated"
    arguments: tuple[str, ...] = ()
    prompt_format: PromptFormat = "token_ids"

    @property
    def setup(self) -> Setup:
        return Setup((), ("--prefill-nodes", "0", *self.arguments))

    def install(self, directory: Path) -> None:
        """Creates the peer's directory; there is nothing to install."""
        directory.mkdir(parents=True, exist_ok=True)

    def serve(self, directory: Path, model: Path) -> AbstractContextManager[Server]:
        return Kvrelay(Topology.parse("0P+1D"), self.arguments).serve(directory, model)
