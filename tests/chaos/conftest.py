"""One cluster of real processes for all tests of this folder, since its start takes seconds; every test heals it."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.chaos.report import Report
from tests.chaos.run import Stage, stage

MAX_TOKENS = 80


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def on(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    """Yields a cluster over shared memory. Fails at its end if anything is left, or a process ends with an error."""
    report = Report("all tests", "shared_memory", seed=0)
    async with stage(tmp_path_factory.mktemp("chaos"), report, max_tokens=MAX_TOKENS) as opened:
        yield opened
    assert report.violations == {}, report.readable()
