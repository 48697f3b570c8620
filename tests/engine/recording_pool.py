"""A BlockPool that remembers what it has retracted, and names for its blocks."""

from collections.abc import Sequence

from kvrelay.core.kv.block_hash import BlockHash
from kvrelay.engine.block_pool import BlockPool


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


class Pool(BlockPool):
    """A pool that records which blocks were retracted, and under which names."""

    def __init__(self, num_blocks: int) -> None:
        self.retracted: list[tuple[int, BlockHash | None]] = []
        super().__init__(num_blocks, retract=self._remember)

    def _remember(self, block_ids: Sequence[int]) -> None:
        self.retracted += [(block_id, self.hash_of(block_id)) for block_id in block_ids]
