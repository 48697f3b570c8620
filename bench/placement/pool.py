"""The KV blocks of a virtual node."""

import itertools
from collections import OrderedDict
from collections.abc import Sequence

from kvrelay.core.kv.block_hash import BlockHash
from router.nodes.kv_index import KVIndex


class Pool:
    """Blocks without content. Those that no request uses count as free; the stored ones among them can be found until
    others take their room, those that were left longest ago first.

    Invariant: there are no more blocks than the pool has room for, and the router's index knows those that are stored.
    """

    def __init__(self, node_id: str, num_blocks: int, index: KVIndex) -> None:
        self.node_id = node_id
        self.num_free = num_blocks
        self._index = index
        self._num_users: dict[BlockHash, int] = {}
        self._unused: OrderedDict[BlockHash, None] = OrderedDict()
        self._stored: set[BlockHash] = set()

    def num_leading(self, names: Sequence[BlockHash]) -> int:
        """Returns how many of the first of these blocks are stored, without a gap."""
        return sum(1 for _ in itertools.takewhile(self._stored.__contains__, names))

    def num_taken(self, names: Sequence[BlockHash]) -> int:
        """Returns how many free blocks `use` would take for these."""
        return sum(1 for name in names if name not in self._num_users)

    def use(self, names: Sequence[BlockHash]) -> None:
        """Keeps these blocks until `leave`; those that are not here take the room of unused ones."""
        self.num_free -= self.num_taken(names)
        assert self.num_free >= 0
        for name in names:
            self._unused.pop(name, None)
            self._num_users[name] = self._num_users.get(name, 0) + 1
        self._evict()

    def store(self, names: Sequence[BlockHash]) -> None:
        """Notes that these blocks, which are in use, have their KV."""
        new = [name for name in names if name not in self._stored]
        self._stored.update(new)
        self._index.stored(self.node_id, new)

    def leave(self, names: Sequence[BlockHash]) -> None:
        """Ends a use."""
        for name in reversed(names):  # so that a prefix goes after its continuations
            self._num_users[name] -= 1
            if not self._num_users[name]:
                del self._num_users[name]
                self._unused[name] = None
                self.num_free += 1
        self._evict()

    def _evict(self) -> None:
        evicted = [self._unused.popitem(last=False)[0] for _ in range(len(self._unused) - self.num_free)]
        self._stored.difference_update(evicted)
        self._index.removed(self.node_id, evicted)
