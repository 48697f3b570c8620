"""Other processes that hold blocks, none of which outlives the test that has started it."""

from collections.abc import Iterator

import pytest

from tests.kv_connector.owner_process import OwnerProcess, StartOwner


@pytest.fixture
def start_owner() -> Iterator[StartOwner]:
    """Yields a function that starts an `OwnerProcess`. At the end all of them are killed, however the test has ended: a
    stopped one would stay for ever."""
    started: list[OwnerProcess] = []

    def start(module: str, *arguments: str) -> OwnerProcess:
        started.append(OwnerProcess(module, *arguments))
        return started[-1]

    yield start
    for process in started:
        process.kill()
