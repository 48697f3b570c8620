"""One cluster of real processes for the whole folder, since its start takes seconds; every test leaves it whole."""

import shutil
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from tests.chaos.catalogue import catalogue
from tests.chaos.load import Load, undisturbed
from tests.chaos.nodes import ChaosCluster, Setup, chaos_cluster
from tests.chaos.streams import Answer, Ask
from tests.e2e.cluster import link_model
from tests.e2e.processes import processes_of

MAX_TOKENS = 80


@dataclass(frozen=True, slots=True)
class Ready:
    """A cluster, and what it has answered before anything happened to it."""

    cluster: ChaosCluster
    asks: Sequence[Ask]
    expected: dict[str, Answer]

    def load(self, *, seed: int, aborts: float = 0.0) -> Load:
        return Load(self.cluster.client, self.asks, self.expected, seed=seed, aborts=aborts)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def ready(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ready]:
    """Over shared memory. Fails if a process or a segment is left, or a node ends badly."""
    directory: Path = tmp_path_factory.mktemp("chaos")
    setup = Setup(link_model(directory), directory)
    asks = catalogue(max_tokens=MAX_TOKENS)
    async with chaos_cluster(setup) as cluster:
        yield Ready(cluster, asks, await undisturbed(cluster.client, asks))
        assert await cluster.stop() == dict.fromkeys(("router", *cluster.nodes), 0)
        assert processes_of(setup.model) == {}
        assert list(setup.pools.iterdir()) == []
    shutil.rmtree(setup.pools)
