"""kvrelay itself, as `kvrelay serve` starts it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.local_cluster import local_cluster
from bench.peers.base import Server
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
