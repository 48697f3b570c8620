"""Whether a queued sequence still lacks blocks, told at each step in a time that does not depend on its length.

Invariant: a sequence for which the pool has enough blocks is never told to lack them.
"""

from dataclasses import dataclass

from kvrelay.core.kv.layout import num_blocks_for
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.sequence import Sequence


@dataclass(slots=True)
class BlockShortage:
    """What the pool lacked when the blocks of a queued sequence were looked up.

    The progress since then is told by `num_given_back - num_kept + num_found`, of which `num_found` counts the leading
    blocks of the sequence that had a block under their names. Whatever shrinks the shortage by one block raises the
    progress by at least one. So no lookup is needed before the progress has risen by the shortage, to `enough`."""

    order: tuple[int, int, int]  # of the sequence, which is not kept if it is removed
    num_found: int
    enough: int

    def persists(self, sequence: Sequence, pool: BlockPool, *, num_kept: int) -> bool:
        """Tells whether it is certain that this sequence does not fit yet while `num_kept` blocks are kept for others.
        Advances `num_found` over the names that have a block now."""
        if sequence.order != self.order:
            return False
        num_cacheable = sequence.num_cacheable_blocks
        while self.num_found < num_cacheable and pool.find(sequence.block_hash(self.num_found)) is not None:
            self.num_found += 1
        return pool.num_given_back - num_kept + self.num_found < self.enough


def find_shortage(sequence: Sequence, pool: BlockPool, *, num_kept: int) -> BlockShortage | None:
    """Looks up the blocks of a queued sequence, which holds none. Returns None if the pool has enough for all its
    tokens while `num_kept` are kept for others. Otherwise those that it finds will be the last to be evicted."""
    found = pool.lookup(sequence.block_hashes(sequence.num_cacheable_blocks))
    num_blocks = num_blocks_for(sequence.num_tokens, sequence.block_size)
    pool.acquire(found)
    num_lacking = num_blocks - len(found) - (pool.num_free - num_kept)
    pool.release(found)
    if num_lacking <= 0:
        return None
    return BlockShortage(sequence.order, len(found), pool.num_given_back - num_kept + len(found) + num_lacking)
