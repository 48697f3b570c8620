"""What a UCX connector needs to start, and what it leaves when it is closed."""

import asyncio
from pathlib import Path

import pytest

from kv_connector.base import FetchOutcome
from kv_connector.settings import UcxSettings
from kv_connector.ucx.connector import UcxConnector
from kvrelay.core.errors import ConfigurationError
from tests.kv_connector.backends import CLUSTER_SECRET, EPOCH, LAYOUT, Node, blocks, write_and_publish


def node(node_id: str, *, num_blocks: int = 4) -> Node:
    return Node(UcxConnector(UcxSettings(CLUSTER_SECRET)), node_id, num_blocks, LAYOUT, EPOCH)


async def test_closing_leaves_no_task_and_no_socket() -> None:
    before = open_files()
    for _ in range(3):
        owner, reader = node("owner"), node("reader")
        await write_and_publish(owner, blocks(4))
        assert set(await reader.connector.fetch(owner.source, blocks(4), timeout=10)) == {FetchOutcome.FETCHED}
        for each in (reader, owner, reader, owner):
            await each.connector.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}
    assert open_files() == before


async def test_without_memory_for_the_pool_nothing_is_left() -> None:
    before = open_files()
    with pytest.raises(ConfigurationError, match="lower num_blocks"):
        node("large", num_blocks=1 << 40)
    assert open_files() == before


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_without_a_secret_or_an_address_it_does_not_start() -> None:
    for secret in ("", "short"):
        with pytest.raises(ConfigurationError, match=r"secret of at least 16 characters.*KVRELAY_CLUSTER_SECRET"):
            UcxConnector(UcxSettings(secret))
    with pytest.raises(ConfigurationError, match="--ucx-host"):
        UcxConnector(UcxSettings(CLUSTER_SECRET, host="0.0.0.0"))
    assert CLUSTER_SECRET not in repr(UcxSettings(CLUSTER_SECRET))
