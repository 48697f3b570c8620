"""Names for computed blocks. Named blocks are offered to the node, which publishes them.

Invariant: a block is named once its tokens are known and the step that filled it has been collected or reports that its
KV is written, unless its sequence holds a tainted block or no block has the name before it. The names before a named
block therefore lead back to the start of its prompt, and distrust of any of them reaches it.
"""

from kvrelay.core.kv.block_hash import BlockHash
from kvrelay.core.kv.named_block import NamedBlock
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.in_flight import StepsInFlight
from kvrelay.engine.request import KVRole
from kvrelay.engine.sequence import Sequence
from kvrelay.engine.step_result import Changes


class BlockNames:
    """The names of the blocks that sequences fill. `publish` and `publish_hits` are those of `Engine`. Offered blocks
    are pinned and reported in `changes.named`."""

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
        """Names the full blocks among the computed tokens and the `num_written_tokens` after them, which a step in
        flight has written. What comes of a tainted block gets no name."""
        num_full = (sequence.num_computed_tokens + num_written_tokens) // self._block_size
        if num_full == sequence.num_named_blocks:
            return
        if not self._pool.has_tainted(sequence.block_table):
            block_hashes = sequence.block_hashes(num_full)
            for index in range(sequence.num_named_blocks, num_full):
                parent = block_hashes[index - 1] if index else None
                self._name(sequence, index, block_hashes[index], parent, self._block_size)
        sequence.num_named_blocks = num_full

    def name_tail(self, sequence: Sequence) -> None:
        """Names the partial last block of the given tokens, if there is one."""
        tail = sequence.given_tail()
        if tail is not None and not self._pool.has_tainted(sequence.block_table):
            block_hash, num_tokens = tail
            index = len(sequence.block_table) - 1
            parent = sequence.block_hash(index - 1) if index else None
            self._name(sequence, index, block_hash, parent, num_tokens)

    def offer_hits(self, sequence: Sequence) -> None:
        """Offers the blocks that a PRODUCE request has found by name, if `publish_hits` is set, up to the first that is
        not to be found any more. Called before its first progress is reported."""
        if not self._publish_hits:
            return
        num_hits = sequence.num_cached_tokens // self._block_size
        for block_id, block_hash in zip(sequence.block_table, sequence.block_hashes(num_hits), strict=False):
            if self._pool.find(block_hash) != block_id or self._pool.is_distrusted(block_id):
                return
            self._offer(NamedBlock(block_id, block_hash, self._block_size))

    def _name(
        self, sequence: Sequence, index: int, block_hash: BlockHash, parent: BlockHash | None, num_tokens: int
    ) -> None:
        """Names a computed block. If another block has the name already, the sequence takes that one and releases its
        own, unless that one is distrusted. Once that one has lost the name, what the sequence has behind its own gets
        none either.
        """
        if parent is not None and self._pool.find(parent) is None:
            return
        block_id = sequence.block_table[index]
        named_block_id = self._pool.find(block_hash)
        if named_block_id is None:
            self._pool.register(block_id, block_hash, parent=parent)
            if self._publish:
                self._offer(NamedBlock(block_id, block_hash, num_tokens))
            return
        if self._pool.is_distrusted(named_block_id):
            return
        if named_block_id != block_id:
            self._pool.acquire([named_block_id])
            self._in_flight.release([block_id])
            sequence.block_table[index] = named_block_id
        if self._publish_hits and sequence.request.role is KVRole.PRODUCE:
            self._offer(NamedBlock(named_block_id, block_hash, num_tokens))

    def _offer(self, block: NamedBlock) -> None:
        """Pins a block and reports it to the node, which publishes and then unpins it."""
        self._pool.pin([block.block_id])
        self._changes.named.append(block)
