"""Gives computed blocks their names, and offers them to the node to be published.

Invariant: a block is named when its tokens are known and the step that has filled it is collected, or says that its KV
is written.
"""

from kvrelay.core.block_hash import BlockHash
from kvrelay.core.named_block import NamedBlock
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.changes import Changes
from kvrelay.engine.in_flight import StepsInFlight
from kvrelay.engine.request import KVRole
from kvrelay.engine.sequence import Sequence


class BlockNames:
    """`publish` and `publish_hits` as Engine's. What is offered is pinned and reported in `changes.named`."""

    def __init__(
        self,
        pool: BlockPool,
        in_flight: StepsInFlight,
        changes: Changes,
        *,
        block_size: int,
        publish: bool,
        publish_hits: bool,
    ) -> None:
        self._pool = pool
        self._in_flight = in_flight
        self._changes = changes
        self._block_size = block_size
        self._publish = publish
        self._publish_hits = publish and publish_hits

    def name_full_blocks(self, sequence: Sequence, *, num_written_tokens: int = 0) -> None:
        """Those that `num_computed_tokens` cover, with as many more that a step in flight has written."""
        num_full = (sequence.num_computed_tokens + num_written_tokens) // self._block_size
        if num_full == sequence.num_named_blocks:
            return
        names = sequence.names(num_full)
        for index in range(sequence.num_named_blocks, num_full):
            self._name(sequence, index, names[index], self._block_size)
        sequence.num_named_blocks = num_full

    def name_tail(self, sequence: Sequence) -> None:
        """The partial last block of the given tokens, if there is one."""
        tail = sequence.given_tail()
        if tail is not None:
            self._name(sequence, len(sequence.block_table) - 1, *tail)

    def offer_hits(self, sequence: Sequence) -> None:
        """Before the first progress of a PRODUCE request: the blocks that were here already, if those are asked for."""
        if not self._publish_hits:
            return
        num_hits = sequence.num_cached_tokens // self._block_size
        for block_id, block_hash in zip(sequence.block_table, sequence.names(num_hits), strict=False):
            self._offer(NamedBlock(block_id, block_hash, self._block_size))

    def _name(self, sequence: Sequence, index: int, block_hash: BlockHash, num_tokens: int) -> None:
        """Names a computed block; when another block has the name already, the sequence takes that one and gives its
        own back.
        """
        block_id = sequence.block_table[index]
        holder = self._pool.find(block_hash)
        if holder is None:
            self._pool.register(block_id, block_hash)
            if self._publish:
                self._offer(NamedBlock(block_id, block_hash, num_tokens))
            return
        if holder != block_id:
            self._pool.acquire([holder])
            self._in_flight.release([block_id])
            sequence.block_table[index] = holder
        if self._publish_hits and sequence.request.role is KVRole.PRODUCE:
            self._offer(NamedBlock(holder, block_hash, num_tokens))

    def _offer(self, block: NamedBlock) -> None:
        """Has the node publish a block; it unpins it."""
        self._pool.pin([block.block_id])
        self._changes.named.append(block)
