"""Fixtures of the engine's tests."""

import os
from collections.abc import Iterator

import pytest
from paged_kernels.cpu.threads import threads_kept

from kvrelay.core.process.core_table import CoreShare, CoreTable


@pytest.fixture
def shares() -> Iterator[tuple[CoreShare, CoreShare]]:
    """Makes the shares of two nodes with one core each."""
    descriptor = CoreTable.create(2, 2)
    table = CoreTable(descriptor)
    os.close(descriptor)  # the mapping stays
    with threads_kept():
        yield CoreShare(1, table, 0), CoreShare(1, table, 1)
