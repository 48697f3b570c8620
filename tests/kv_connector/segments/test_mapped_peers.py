"""What the log says of a peer whose segment cannot be mapped."""

from dataclasses import replace
from pathlib import Path

import pytest

from kv_connector.base import FetchOutcome
from kv_connector.segments.shared_memory import SharedMemoryConnector
from kv_connector.settings import SharedMemorySettings
from tests.kv_connector.backends import LAYOUT, Node, blocks, write_and_publish


async def test_a_segment_that_is_not_here_is_named_once_with_the_setting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two containers of one host may have a /dev/shm each. A node that restarts there has another segment each time."""
    here, there = tmp_path / "here", tmp_path / "there"
    for directory in (here, there):
        directory.mkdir()
    owner = Node(SharedMemoryConnector(SharedMemorySettings(str(there))), "owner", 16, LAYOUT, 1)
    reader = Node(SharedMemoryConnector(SharedMemorySettings(str(here))), "reader", 16, LAYOUT, 1)
    await write_and_publish(owner, blocks(1))
    restarted = replace(owner.source, epoch=2, endpoint="kvrelay-owner-0000000000000002.kv")
    for source in (owner.source, owner.source, restarted):
        assert await reader.connector.fetch(source, blocks(1), timeout=10) == (FetchOutcome.FAILED,)
    [record] = caplog.records
    message = record.getMessage()
    assert f"node owner is on this host, but there is no {here / owner.source.endpoint}" in message
    assert "--shared-memory-dir" in message
    await reader.connector.close()
    await owner.connector.close()
