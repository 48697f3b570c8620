"""The state of every block of the KV pool: in use, cached under a name, or free.

Invariant: every block is in exactly one of three states. *In use*: a request or a transfer holds it. *Evictable*:
nobody holds it, it has a name, and a later request may find it. *Free*: nobody holds it and its content means nothing.
A block leaves "in use" only when its request references and its pins are both zero, so a transfer of this node never
reads or writes memory that belongs to someone else. (Other nodes read without a pin, and notice by header and digest.)

A block whose content is *distrusted* is not found by name any more, and loses its name as soon as no transfer holds it.
It is *tainted* for as long as anybody holds it: what is computed behind it must not be named.

Sharing blocks by reference counts follows PagedAttention (Kwon et al., 2023), section 4.4. Evicting the least recently
used block, tails before heads, follows RadixAttention (Zheng et al., 2024), section 3.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from kvrelay.core.kv.block_hash import BlockHash


class BlockPool:
    """Free list, reference counts, hash index and eviction of `num_blocks` blocks, ids `0 .. num_blocks - 1`.

    The engine thread owns it and is the only caller. It knows ids and names, never the memory. Every operation takes
    constant time per block. Misuse (a reference given back twice, a free block acquired) is our own fault and raises
    AssertionError.

    `retract(block_ids)` withdraws blocks from peers, while `hash_of` still knows their names. It may be called
    repeatedly for the same blocks, and must neither change the pool nor raise.
    """

    def __init__(self, num_blocks: int, *, retract: Callable[[Sequence[int]], None]) -> None:
        self.num_blocks = num_blocks
        self._retract = retract
        self._request_refs = [0] * num_blocks
        self._pins = [0] * num_blocks
        self._block_hashes: list[BlockHash | None] = [None] * num_blocks
        self._index: dict[BlockHash, int] = {}
        # How names follow each other. A forgotten name keeps its place for as long as one behind it has a block.
        self._parents: dict[BlockHash, BlockHash] = {}
        self._children: dict[BlockHash, set[BlockHash]] = {}  # the same, the other way round
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the block freed last is used next
        self._evictable: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self._num_cached = 0  # times that a block became evictable
        self._stored: dict[BlockHash, None] = {}
        self._removed: dict[BlockHash, None] = {}
        self._distrusted: set[int] = set()  # that have a name, because a transfer holds them
        self._lost_names: list[BlockHash] = []
        self._tainted: set[int] = set()  # all of them held

    @property
    def num_free(self) -> int:
        """Counts the blocks that `allocate` could hand out: free or evictable ones."""
        return len(self._free) + len(self._evictable)

    @property
    def num_given_back(self) -> int:
        """Returns a number to compare with an earlier one: whatever makes one more block free raises it by at least
        one. Only `allocate` lowers it, by one for each block that it hands out without evicting."""
        return len(self._free) + self._num_cached

    def allocate(self, count: int) -> list[int] | None:
        """Returns `count` unnamed blocks with one request reference each, or None, with nothing changed, if there are
        fewer.

        Takes free blocks first, then evicts cached ones, the least recently released first.
        """
        if count > self.num_free:
            return None
        num_plain = min(count, len(self._free))
        block_ids = [self._free.pop() for _ in range(num_plain)]
        evicted = [self._evictable.popitem(last=False)[0] for _ in range(count - num_plain)]
        self._forget(evicted)
        block_ids += evicted
        for block_id in block_ids:
            self._request_refs[block_id] = 1
        return block_ids

    def acquire(self, block_ids: Sequence[int], *, times: int = 1) -> None:
        """Adds `times` request references to each block. The blocks are in use or evictable, as `lookup` returns
        them."""
        self._take(block_ids, self._request_refs, times)

    def release(self, block_ids: Sequence[int]) -> None:
        """Takes one request reference from each block.

        `block_ids` is a sequence's block table, first block first. Its blocks are released from the end, so that the
        tail of a prefix is evicted before the head: a head without its tail is still a hit, a tail without its head
        cannot be found.
        """
        self._give_back(block_ids, self._request_refs)

    def pin(self, block_ids: Sequence[int]) -> None:
        """Adds one pin, the reference of a transfer, to each block. The blocks are in use or evictable."""
        self._take(block_ids, self._pins, 1)

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Takes one pin from each block, the last block first as in `release`."""
        self._give_back(block_ids, self._pins)
        if self._distrusted:
            self._forget_distrusted()
            if pinned := self._distrusted.intersection(block_ids):
                self._retract([*pinned])  # what has been published since then

    def lookup(self, block_hashes: Sequence[BlockHash]) -> list[int]:
        """Returns the blocks of the longest prefix of `block_hashes` that the pool has. It takes no references: the
        caller must `acquire` the blocks before the next `allocate`."""
        block_ids = []
        for block_hash in block_hashes:
            block_id = self._index.get(block_hash)
            if block_id is None or block_id in self._distrusted:
                break
            block_ids.append(block_id)
        return block_ids

    def find(self, block_hash: BlockHash) -> int | None:
        """Returns the block of that name, or None. Takes no reference."""
        return self._index.get(block_hash)

    def is_distrusted(self, block_id: int) -> bool:
        """Tells whether a block is distrusted that still has its name."""
        return block_id in self._distrusted

    def register(self, block_id: int, block_hash: BlockHash, *, parent: BlockHash | None = None) -> None:
        """Names a block that is in use, not tainted, and whose content is complete. It has no name yet, and no block
        has this one. `parent`: the name of the block before it, if there is one; the pool has a block of that name."""
        assert self._is_held(block_id), f"block {block_id} is to be named, but nobody holds it"
        assert block_id not in self._tainted, f"block {block_id} is to be named, but is tainted"
        assert self._block_hashes[block_id] is None, f"block {block_id} is to be named, but has a name"
        assert block_hash not in self._index, f"block {block_id} is to get the name of block {self._index[block_hash]}"
        assert parent is None or parent in self._index, f"block {block_id} is to follow a name that no block has"
        self._block_hashes[block_id] = block_hash
        self._index[block_hash] = block_id
        if parent is not None:
            self._parents[block_hash] = parent
            self._children.setdefault(parent, set()).add(block_hash)
        _note(block_hash, into=self._stored, unless=self._removed)

    def distrust(self, block_hashes: Iterable[BlockHash]) -> None:
        """Has nobody find the blocks of these names any more, nor those behind them, also where blocks in between have
        been evicted; they are retracted at once. Whoever holds them keeps them, and they are tainted. The names are
        reported by `drain_distrusted`, also those that only the store may know. Takes time linear in the number of
        names behind."""
        names: set[BlockHash] = set()
        left = list(block_hashes)
        while left:
            name = left.pop()
            if name not in names:
                names.add(name)
                left += self._children.get(name, ())
        self._lost_names += [name for name in names if name not in self._index]
        block_ids = {self._index[name] for name in names if name in self._index}
        pinned = [block_id for block_id in block_ids - self._distrusted if self._pins[block_id]]
        self._distrusted |= block_ids
        if pinned:
            self._retract(pinned)  # what is being published comes back, until the publication is unpinned
        self._forget_distrusted()
        self._tainted.update(filter(self._is_held, block_ids))

    def has_tainted(self, block_ids: Sequence[int]) -> bool:
        """Tells whether any of these blocks is tainted."""
        return bool(self._tainted) and not self._tainted.isdisjoint(block_ids)

    def hash_of(self, block_id: int) -> BlockHash | None:
        return self._block_hashes[block_id]

    def ref_count(self, block_id: int) -> int:
        """Returns the number of request references, without pins."""
        return self._request_refs[block_id]

    def drain_changes(self) -> tuple[list[BlockHash], list[BlockHash]]:
        """Returns the names (stored, removed) since the last call. A name that was stored and removed, or removed and
        stored again, is in neither list."""
        changes = list(self._stored), list(self._removed)
        self._stored.clear()
        self._removed.clear()
        return changes

    def drain_distrusted(self) -> list[BlockHash]:
        """Returns the distrusted names that no block has, or has any more, since the last call."""
        names, self._lost_names = self._lost_names, []
        return names

    def check_integrity(self) -> None:
        """Raises AssertionError for the first broken invariant. Takes time linear in the size of the pool, so call it
        when idle and in tests."""
        free = set(self._free)
        _check(len(free) == len(self._free), "a block is on the free list twice")
        for block_id in range(self.num_blocks):
            requests, pins = self._request_refs[block_id], self._pins[block_id]
            block_hash = self._block_hashes[block_id]
            _check(requests >= 0 and pins >= 0, f"block {block_id} has {requests} request references and {pins} pins")
            places = (requests + pins > 0, block_id in free, block_id in self._evictable)
            _check(sum(places) == 1, f"block {block_id} is (in use, free, evictable) = {places}")
            _check(not (block_id in free and block_hash is not None), f"free block {block_id} has a name")
            _check(not (block_id in self._evictable and block_hash is None), f"evictable block {block_id} has no name")
            if block_hash is not None:
                _check(self._index.get(block_hash) == block_id, f"block {block_id} is not in the index under its name")
        num_named = sum(block_hash is not None for block_hash in self._block_hashes)
        _check(len(self._index) == num_named, f"the index has {len(self._index)} names, {num_named} blocks have one")
        num_in_use = sum(self._is_held(block_id) for block_id in range(self.num_blocks))
        _check(num_in_use + self.num_free == self.num_blocks, "in use, free and evictable do not add up")
        links = {(parent, name) for parent, names in self._children.items() for name in names}
        _check({(parent, name) for name, parent in self._parents.items()} == links, "the names' links differ")
        _check(all(self._children.values()), "a name has an empty set of children")
        idle = [name for name in self._parents if name not in self._index and name not in self._children]
        _check(not idle, f"{len(idle)} names are kept that nothing follows")
        _check(not self._stored.keys() & self._removed.keys(), "a name is both stored and removed")
        _check(all(self._pins[block_id] for block_id in self._distrusted), "a distrusted block has kept its name")
        _check(all(map(self._is_held, self._tainted)), "a block that nobody holds has stayed tainted")

    def check_idle(self) -> None:
        """Raises AssertionError for a broken invariant (`check_integrity`), or if anybody holds a block."""
        self.check_integrity()
        held = [block_id for block_id in range(self.num_blocks) if self._is_held(block_id)]
        _check(not held, f"blocks {held[:8]} ({len(held)} in all) are still held")

    def _is_held(self, block_id: int) -> bool:
        return self._request_refs[block_id] > 0 or self._pins[block_id] > 0

    def _take(self, block_ids: Sequence[int], counts: list[int], times: int) -> None:
        for block_id in block_ids:
            if counts[block_id] == 0 and not self._is_held(block_id):
                assert block_id in self._evictable, f"block {block_id} is free, there is nothing to take"
                del self._evictable[block_id]
            counts[block_id] += times

    def _give_back(self, block_ids: Sequence[int], counts: list[int]) -> None:
        for block_id in reversed(block_ids):
            assert counts[block_id] > 0, f"block {block_id} is given back more often than it was taken"
            counts[block_id] -= 1
            if counts[block_id] > 0 or self._is_held(block_id):
                continue
            if self._block_hashes[block_id] is None:
                self._free.append(block_id)
                self._tainted.discard(block_id)
            else:
                self._evictable[block_id] = None
                self._num_cached += 1

    def _forget_distrusted(self) -> None:
        """Takes the names of distrusted blocks, but for those that a transfer holds, which may be publishing them."""
        block_ids = [block_id for block_id in self._distrusted if not self._pins[block_id]]
        for block_id in block_ids:
            name = self._block_hashes[block_id]
            assert name is not None
            self._lost_names.append(name)
        self._forget(block_ids)
        self._distrusted.difference_update(block_ids)
        for block_id in block_ids:
            if block_id in self._evictable:
                del self._evictable[block_id]
                self._free.append(block_id)
                self._tainted.discard(block_id)

    def _forget(self, block_ids: Sequence[int]) -> None:
        """Retracts these blocks, then removes their names."""
        if not block_ids:
            return
        self._retract(block_ids)
        for block_id in block_ids:
            block_hash = self._block_hashes[block_id]
            assert block_hash is not None
            self._block_hashes[block_id] = None
            del self._index[block_hash]
            self._unlink(block_hash)
            _note(block_hash, into=self._removed, unless=self._stored)

    def _unlink(self, name: BlockHash) -> None:
        """Drops what follows what, from a forgotten name upwards, as far as nothing that has a block is behind it."""
        while name not in self._index and name not in self._children:
            parent = self._parents.pop(name, None)
            if parent is None:
                return
            siblings = self._children[parent]
            siblings.remove(name)
            if siblings:
                return
            del self._children[parent]
            name = parent


def _note(block_hash: BlockHash, *, into: dict[BlockHash, None], unless: dict[BlockHash, None]) -> None:
    """Records a change, or cancels the opposite one if nobody has been told of it yet."""
    if block_hash in unless:
        del unless[block_hash]
    else:
        into[block_hash] = None


def _check(condition: bool, message: str) -> None:
    """Raises AssertionError, also under `python -O`, which removes `assert`."""
    if not condition:
        raise AssertionError(message)
