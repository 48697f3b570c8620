"""Which nodes hold which KV blocks, by name, within a hard memory bound.

Built from the nodes' own events; what it says may lag, so it only ever guides a choice. Invariant: at most `capacity`
names are remembered, each with at least one holder; the names looked up or stored longest ago are forgotten first.
"""

from collections import OrderedDict
from collections.abc import Sequence

from kvrelay.core.block_hash import BlockHash


class KVIndex:
    """name -> set of holders, as one integer with a bit per node: a lookup is a dictionary access and an AND."""

    def __init__(self, capacity: int) -> None:
        assert capacity > 0
        self._capacity = capacity
        self._holders: OrderedDict[BlockHash, int] = OrderedDict()
        self._bits: dict[str, int] = {}

    def __len__(self) -> int:
        """Names remembered."""
        return len(self._holders)

    def stored(self, node_id: str, hashes: Sequence[BlockHash]) -> None:
        """`node_id` now holds these blocks."""
        bit = self._bits.get(node_id) or self._new_bit(node_id)
        holders = self._holders
        for name in reversed(hashes):  # a prefix outlives what hangs on it
            holders[name] = holders.get(name, 0) | bit
            holders.move_to_end(name)
        while len(holders) > self._capacity:
            holders.popitem(last=False)

    def removed(self, node_id: str, hashes: Sequence[BlockHash]) -> None:
        """`node_id` holds these blocks no more; unknown ones are ignored."""
        bit = self._bits.get(node_id, 0)
        for name in hashes:
            mask = self._holders.get(name, 0)
            if mask & bit:
                self._keep(name, mask & ~bit)

    def drop(self, node_id: str) -> None:
        """Forget everything known of a node. Walks the whole index (about half a microsecond per name): for a node that
        restarts, not for every event."""
        bit = self._bits.pop(node_id, 0)
        if bit:
            for name, mask in [(name, mask) for name, mask in self._holders.items() if mask & bit]:
                self._keep(name, mask & ~bit)

    def leading(self, hashes: Sequence[BlockHash]) -> dict[str, int]:
        """For each node that holds the first block: how many of the first blocks it holds without a gap."""
        holders = self._holders
        remaining = -1
        counts: list[tuple[int, int]] = []  # (bits of the nodes that end here, number of blocks)
        num_found = 0
        for name in hashes:
            mask = holders.get(name, 0) & remaining
            if mask != remaining:
                if num_found:
                    counts.append((remaining & ~mask, num_found))
                if not mask:
                    break
                remaining = mask
            num_found += 1
        else:
            if num_found:
                counts.append((remaining, num_found))
        for index in range(num_found - 1, -1, -1):
            holders.move_to_end(hashes[index])
        return {node_id: count for bits, count in counts for node_id, bit in self._bits.items() if bits & bit}

    def check_integrity(self) -> None:
        """Asserts the invariant. For tests."""
        assert len(self._holders) <= self._capacity
        known = sum(self._bits.values())
        assert len(set(self._bits.values())) == len(self._bits)
        for mask in self._holders.values():
            assert mask and not mask & ~known

    def _new_bit(self, node_id: str) -> int:
        used = sum(self._bits.values())
        bit = ~used & (used + 1)  # the lowest that is free
        self._bits[node_id] = bit
        return bit

    def _keep(self, name: BlockHash, mask: int) -> None:
        if mask:
            self._holders[name] = mask
        else:
            del self._holders[name]
