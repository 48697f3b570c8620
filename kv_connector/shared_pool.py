"""A pool and the table of its published blocks, for backends that answer peers from the pool itself.

Invariant: a header is visible only while its block has that content, and is never the same object again afterwards.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kv_connector.header import BlockHeader
from kv_connector.payloads import Payloads
from kvrelay.core.kv.block_hash import BlockHash
from kvrelay.core.kv.named_block import NamedBlock

PoolT = TypeVar("PoolT", bound=Payloads)


@dataclass(slots=True)
class SharedPool(Generic[PoolT]):
    """The published blocks. `remove` may be called from any thread, everything else from the node's loop."""

    pool: PoolT
    epoch: int
    headers: dict[int, BlockHeader] = field(default_factory=dict)  # by block id
    ids_by_name: dict[BlockHash, set[int]] = field(default_factory=dict)
    generations: list[int] = field(init=False)  # per block, grows with every change; for publications under way
    lock: threading.Lock = field(default_factory=threading.Lock)  # held for dictionary updates only

    def __post_init__(self) -> None:
        self.generations = [0] * self.pool.num_blocks

    async def publish(self, blocks: Sequence[NamedBlock]) -> int:
        """Digests blocks and makes them visible, except those that are so already or are retracted meanwhile; returns
        how many became visible."""
        generations = self.generations
        fresh = [(block, generations[block.block_id]) for block in blocks if not self._holds(block)]
        headers = await self.pool.describe_all([block for block, _ in fresh], self.epoch)
        return sum(
            self._put(block.block_id, header, generation)
            for (block, generation), header in zip(fresh, headers, strict=True)
        )

    def _put(self, block_id: int, header: BlockHeader, generation: int) -> bool:
        """Makes a header visible, unless the block was retracted since `generation` was read; tells whether it did."""
        with self.lock:
            if self.generations[block_id] != generation:
                return False
            self._remove(block_id)
            self.headers[block_id] = header
            self.ids_by_name.setdefault(header.block_hash, set()).add(block_id)
        return True

    def remove(self, block_ids: Sequence[int]) -> None:
        with self.lock:
            for block_id in block_ids:
                self._remove(block_id)

    def find(self, name: BlockHash) -> list[tuple[int, BlockHeader]]:
        """Returns id and header of every block under this name."""
        with self.lock:
            return [(block_id, self.headers[block_id]) for block_id in self.ids_by_name.get(name, ())]

    def shows(self, block_id: int, header: BlockHeader) -> bool:
        """Tells whether a header from `find` has been visible ever since: a copy made meanwhile counts only then."""
        return self.headers.get(block_id) is header  # an equal one may have come after a retraction

    def _holds(self, block: NamedBlock) -> bool:
        held = self.headers.get(block.block_id)
        return held is not None and (held.block_hash, held.num_tokens) == (block.block_hash, block.num_tokens)

    def _remove(self, block_id: int) -> None:
        self.generations[block_id] += 1
        header = self.headers.pop(block_id, None)
        if header is not None:
            same_name = self.ids_by_name[header.block_hash]
            same_name.discard(block_id)
            if not same_name:
                del self.ids_by_name[header.block_hash]
