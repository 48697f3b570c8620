"""What a reader reports of a block that several slots have, or had."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kv_connector.base import FetchOutcome
from kv_connector.header import Mismatch
from kv_connector.pool import Rows, copy_rows
from kv_connector.segments.shared_memory import SharedMemoryConnector
from kv_connector.settings import SharedMemorySettings
from tests.kv_connector.backends import EPOCH, LAYOUT, Node, blocks, write_and_publish


async def test_a_block_stays_refused_though_another_slot_of_it_is_retracted_meanwhile(tmp_path: Path) -> None:
    settings = SharedMemorySettings(str(tmp_path))
    owner = Node(SharedMemoryConnector(settings), "owner", 16, LAYOUT, EPOCH)

    def copy(target: Rows, target_rows: Sequence[int], source: Rows, source_rows: Sequence[int]) -> Sequence[bytes]:
        assert list(source_rows) == [0]
        owner.connector.retract([1])
        return copy_rows(target, target_rows, source, source_rows)

    peer = Node(SharedMemoryConnector(settings, copy=copy), "peer", 16, LAYOUT, EPOCH)
    [block] = blocks(1)
    await write_and_publish(owner, [block, replace(block, block_id=1)])
    owner.row(0)[-1] ^= 1
    assert await peer.connector.fetch(owner.source, [block], timeout=10) == (FetchOutcome.REFUSED,)
    assert peer.first_stats.refused[Mismatch.DIGEST] == 1
    assert peer.first_stats.missing == 0
    await owner.connector.close()
    await peer.connector.close()
