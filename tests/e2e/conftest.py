"""One cluster for all tests of this folder, since a start takes seconds: a prefill and a decode node, the default of
`kvrelay serve`.

Every program here starts in a directory with folders that are named like our packages and fail when they are imported.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import SMALL, Cluster, Oracle, link_model, served

PACKAGES = ("kvrelay", "router", "prefill_node", "decode_node", "kv_connector", "paged_kernels")


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the directory in which programs start."""
    path = tmp_path_factory.mktemp("working-directory")
    for package in PACKAGES:
        (path / package).mkdir()
        for file in ("__init__.py", "__main__.py"):
            (path / package / file).write_text('raise ImportError("picked up from the working directory")\n')
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Returns the demo model under a path that only this test's processes know."""
    return link_model(tmp_path)


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory, directory: Path) -> Iterator[Cluster]:
    """Yields a cluster of one prefill and one decode node in float32. Every prompt goes to the prefill node."""
    model = link_model(tmp_path_factory.mktemp("cluster"))
    with served(model, *SMALL, "--local-prefill-max-tokens", "0", directory=directory) as running:
        yield running
