"""Which nodes hold which KV blocks, by name, within a hard memory bound.

It is built from the nodes' events, which come late, so its answers only guide a choice. A dropped node is left out of
answers at once; its bits are removed a few names per call, so that no call takes long. Invariant: at most `capacity`
names are remembered, each with at least one holder that was not dropped or whose bit is not removed yet. The names that
were looked up or stored longest ago are forgotten first.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvrelay.core.kv.block_hash import BlockHash

_SWEPT_PER_CALL = 512  # names: well below a millisecond


class KVIndex:
    """A map from a block's name to its holders, as an integer with a bit per node: a lookup is one access and one AND.

    A sweep removes the bits of dropped nodes. It begins by setting the whole map aside as `_unswept`. Names then move
    from its end to the front of the new map, which keeps their order; those that are used meanwhile move to the end as
    always.
    """

    def __init__(self, capacity: int) -> None:
        assert capacity > 0
        self._capacity = capacity
        self._holders: OrderedDict[BlockHash, int] = OrderedDict()
        self._unswept: OrderedDict[BlockHash, int] = OrderedDict()  # all older than those in `_holders`
        self._bits: dict[str, int] = {}
        self._sweeping = 0  # bits that this sweep removes; only names in `_unswept` may have them
        self._dropped = 0  # bits of nodes dropped since this sweep began; any name may have them

    def __len__(self) -> int:
        """Returns how many names are remembered, including those not swept yet."""
        return len(self._holders) + len(self._unswept)

    def stored(self, node_id: str, hashes: Sequence[BlockHash]) -> None:
        """Notes that `node_id` now holds these blocks."""
        bit = self._bits.get(node_id) or self._new_bit(node_id)
        holders = self._holders
        for block_hash in reversed(hashes):  # so that a prefix is forgotten after its continuations
            holders[block_hash] = holders.get(block_hash, 0) | self._take_unswept(block_hash) | bit
            holders.move_to_end(block_hash)
        while len(self) > self._capacity:
            (self._unswept or holders).popitem(last=False)
        self._sweep()

    def removed(self, node_id: str, hashes: Sequence[BlockHash]) -> None:
        """Notes that `node_id` no longer holds these blocks. Unknown ones are ignored."""
        bit = self._bits.get(node_id, 0)
        for block_hash in hashes:
            for masks in (self._holders, self._unswept):
                mask = masks.get(block_hash, 0)
                if mask & bit:
                    _keep(masks, block_hash, mask & ~bit)
        self._sweep()

    def drop(self, node_id: str) -> None:
        """Forgets everything known of a node. The calls that follow remove its bits."""
        self._dropped |= self._bits.pop(node_id, 0)
        self._sweep()

    def leading(self, hashes: Iterable[BlockHash]) -> dict[str, int]:
        """Returns, for each node that holds the first block, how many of the first blocks it holds without a gap. Takes
        no name behind the first that no node holds."""
        holders, unswept = self._holders, self._unswept
        remaining = ~(self._dropped | self._sweeping)
        counts: list[tuple[int, int]] = []  # (bits of the nodes that end here, number of blocks)
        found: list[BlockHash] = []
        for block_hash in hashes:
            mask = (holders.get(block_hash, 0) or unswept.get(block_hash, 0)) & remaining
            if mask != remaining:
                if found:
                    counts.append((remaining & ~mask, len(found)))
                if not mask:
                    break
                remaining = mask
            found.append(block_hash)
        else:
            if found:
                counts.append((remaining, len(found)))
        for block_hash in reversed(found):
            if block_hash in holders:
                holders.move_to_end(block_hash)
            else:
                holders[block_hash] = self._take_unswept(block_hash)
        return {node_id: count for bits, count in counts for node_id, bit in self._bits.items() if bits & bit}

    def check_integrity(self) -> None:
        """Asserts the invariant. For tests."""
        assert len(self) <= self._capacity
        assert not self._holders.keys() & self._unswept.keys()
        assert len(set(self._bits.values())) == len(self._bits)
        known = sum(self._bits.values())
        assert not known & (self._dropped | self._sweeping)
        for masks, bits in ((self._holders, known | self._dropped), (self._unswept, self._taken())):
            assert all(mask and not mask & ~bits for mask in masks.values())

    def _taken(self) -> int:
        """Returns the bits that some name may have."""
        return sum(self._bits.values()) | self._dropped | self._sweeping

    def _new_bit(self, node_id: str) -> int:
        taken = self._taken()
        bit = ~taken & (taken + 1)  # the lowest that is free
        self._bits[node_id] = bit
        return bit

    def _take_unswept(self, block_hash: BlockHash) -> int:
        """Removes a block from `_unswept` and returns its holders without those being swept; 0 if it was not there."""
        return self._unswept.pop(block_hash, 0) & ~self._sweeping

    def _sweep(self) -> None:
        """Sweeps the next few names, or begins a sweep if there are nodes to remove."""
        if not self._unswept:
            self._sweeping, self._dropped = self._dropped, 0
            if not self._sweeping:
                return
            self._holders, self._unswept = self._unswept, self._holders
        for _ in range(min(_SWEPT_PER_CALL, len(self._unswept))):
            block_hash, mask = self._unswept.popitem()
            if mask & ~self._sweeping:
                self._holders[block_hash] = mask & ~self._sweeping
                self._holders.move_to_end(block_hash, last=False)


def _keep(masks: OrderedDict[BlockHash, int], block_hash: BlockHash, mask: int) -> None:
    if mask:
        masks[block_hash] = mask
    else:
        del masks[block_hash]
