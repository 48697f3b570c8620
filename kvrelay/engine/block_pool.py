"""Which block of the KV pool is in use, which is cached under a name, and which may be written to next.

Invariant: every block is in exactly one of three places. *In use*: some request or some transfer holds it. *Evictable*:
nobody holds it, it has a name, and a later request may find it. *Free*: nobody holds it and its content means nothing.
A block leaves "in use" only when its request references and its pins are both zero, so a transfer never reads or writes
memory that belongs to someone else.

Blocks shared by reference count: PagedAttention (Kwon et al., 2023), section 4.4. Eviction of the least recently used,
tails before heads: RadixAttention (Zheng et al., 2024), section 3.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvrelay.core.block_hash import BlockHash


class BlockPool:
    """Free list, reference counts, hash index and eviction of `num_blocks` blocks, ids `0 .. num_blocks - 1`.

    Not thread-safe: owned by the engine thread, which alone calls it. It knows ids and names only, never the memory.
    Every operation takes constant time for each block it is given. Misuse (a reference given back twice, a block taken
    that nobody holds) is a fault of ours and an AssertionError.

    `on_evict(block_ids)` is told which blocks are about to lose their name (`hash_of` still knows it), before they are
    handed out again; it must not change the pool, and must not raise.
    """

    def __init__(self, num_blocks: int, *, on_evict: Callable[[Sequence[int]], None]) -> None:
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._request_refs = [0] * num_blocks
        self._pins = [0] * num_blocks
        self._block_hashes: list[BlockHash | None] = [None] * num_blocks
        self._index: dict[BlockHash, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: what was used last is used next
        self._evictable: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self._stored: dict[BlockHash, None] = {}
        self._removed: dict[BlockHash, None] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out: free or evictable."""
        return len(self._free) + len(self._evictable)

    def allocate(self, count: int) -> list[int] | None:
        """`count` unnamed blocks with one request reference each; None, and nothing changed, when there are fewer.

        Free blocks go first; then cached ones lose their content, the least recently released first.
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

    def acquire(self, block_ids: Sequence[int]) -> None:
        """One more request reference for each; the blocks are in use or evictable (as `lookup` returns them)."""
        self._take(block_ids, self._request_refs)

    def release(self, block_ids: Sequence[int]) -> None:
        """One request reference less for each.

        `block_ids` is a sequence's block table, first block first. It is given back from its end, so that of one prefix
        the tail is evicted before the head: a head without its tail is still a hit, a tail without its head cannot be
        found.
        """
        self._give_back(block_ids, self._request_refs)

    def pin(self, block_ids: Sequence[int]) -> None:
        """One more transfer reference for each, independent of requests; the blocks are in use or evictable."""
        self._take(block_ids, self._pins)

    def unpin(self, block_ids: Sequence[int]) -> None:
        """One transfer reference less for each, from the end as in `release`."""
        self._give_back(block_ids, self._pins)

    def lookup(self, block_hashes: Sequence[BlockHash]) -> list[int]:
        """The blocks of the longest leading run of `block_hashes` that is held here. Takes no references: `acquire` them
        before the next `allocate`."""
        block_ids = []
        for block_hash in block_hashes:
            block_id = self._index.get(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def find(self, block_hash: BlockHash) -> int | None:
        """The block of that name; takes no reference."""
        return self._index.get(block_hash)

    def register(self, block_id: int, block_hash: BlockHash) -> int:
        """Names a block that is in use and whose content is complete; returns the block that carries the name.

        That is another block when one has the name already; the given one then stays as it was. Giving a block the name
        it has does nothing. A block with another name (a partial block that has grown) loses that one: `on_evict` hears
        of it first.
        """
        assert self._is_held(block_id), f"block {block_id} is named but nobody holds it"
        named_block_id = self._index.get(block_hash)
        if named_block_id is not None:
            return named_block_id
        if self._block_hashes[block_id] is not None:
            self._forget([block_id])
        self._block_hashes[block_id] = block_hash
        self._index[block_hash] = block_id
        _note(block_hash, into=self._stored, unless=self._removed)
        return block_id

    def hash_of(self, block_id: int) -> BlockHash | None:
        return self._block_hashes[block_id]

    def ref_count(self, block_id: int) -> int:
        """Request references; pins are not counted."""
        return self._request_refs[block_id]

    def drain_changes(self) -> tuple[list[BlockHash], list[BlockHash]]:
        """Names (stored, removed) since the last call; one that came and went, or went and came back, is in neither."""
        changes = list(self._stored), list(self._removed)
        self._stored.clear()
        self._removed.clear()
        return changes

    def drop_all_cached(self) -> int:
        """Forgets the names of all blocks that nobody holds; returns how many these were. Blocks in use keep theirs."""
        block_ids = list(self._evictable)
        self._evictable.clear()
        self._forget(block_ids)
        self._free += block_ids
        return len(block_ids)

    def check_integrity(self) -> None:
        """Raises AssertionError with the first broken invariant. Linear in the pool: for idle moments and tests."""
        free = set(self._free)
        _check(len(free) == len(self._free), "a block is twice on the free list")
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
        _check(not self._stored.keys() & self._removed.keys(), "a name is both stored and removed")

    def check_idle(self) -> None:
        """`check_integrity`, and nobody holds any block."""
        self.check_integrity()
        held = [block_id for block_id in range(self.num_blocks) if self._is_held(block_id)]
        _check(not held, f"blocks {held[:8]} ({len(held)} in all) are still held")

    def _is_held(self, block_id: int) -> bool:
        return self._request_refs[block_id] > 0 or self._pins[block_id] > 0

    def _take(self, block_ids: Sequence[int], counts: list[int]) -> None:
        for block_id in block_ids:
            if not self._is_held(block_id):
                assert block_id in self._evictable, f"block {block_id} is free, there is nothing to take"
                del self._evictable[block_id]
            counts[block_id] += 1

    def _give_back(self, block_ids: Sequence[int], counts: list[int]) -> None:
        for block_id in reversed(block_ids):
            assert counts[block_id] > 0, f"block {block_id} is given back more often than it was taken"
            counts[block_id] -= 1
            if self._is_held(block_id):
                continue
            if self._block_hashes[block_id] is None:
                self._free.append(block_id)
            else:
                self._evictable[block_id] = None

    def _forget(self, block_ids: Sequence[int]) -> None:
        """Takes the names of these blocks away."""
        if not block_ids:
            return
        self._on_evict(block_ids)
        for block_id in block_ids:
            block_hash = self._block_hashes[block_id]
            assert block_hash is not None
            self._block_hashes[block_id] = None
            del self._index[block_hash]
            _note(block_hash, into=self._removed, unless=self._stored)


def _note(block_hash: BlockHash, *, into: dict[BlockHash, None], unless: dict[BlockHash, None]) -> None:
    """A change that undoes one not yet told cancels it."""
    if block_hash in unless:
        del unless[block_hash]
    else:
        into[block_hash] = None


def _check(condition: bool, message: str) -> None:
    """Unlike `assert`, kept under `python -O`."""
    if not condition:
        raise AssertionError(message)
