"""One cluster of real processes for the whole folder, since its start takes seconds; every test leaves it whole."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.chaos.report import Report
from tests.chaos.run import Stage, stage

MAX_TOKENS = 80


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def on(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    """Over shared memory. Fails if anything is left, or a process ends badly."""
    report = Report("all tests", "shared_memory", seed=0)
    async with stage(tmp_path_factory.mktemp("chaos"), report, max_tokens=MAX_TOKENS) as opened:
        yield opened
    assert report.violations == {}, report.readable()
