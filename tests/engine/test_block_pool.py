"""BlockPool: where blocks go, which is evicted next, and random histories compared with a model of lists and
searches."""

import random
from collections.abc import Sequence

import pytest

from kvrelay.core.kv.block_hash import BlockHash
from kvrelay.engine.block_pool import BlockPool


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


class Pool(BlockPool):
    """A pool that records which blocks were evicted, and under which names."""

    def __init__(self, num_blocks: int) -> None:
        self.evicted: list[tuple[int, BlockHash | None]] = []
        super().__init__(num_blocks, on_evict=self._remember)

    def _remember(self, block_ids: Sequence[int]) -> None:
        self.evicted += [(block_id, self.hash_of(block_id)) for block_id in block_ids]


def take(pool: BlockPool, count: int) -> list[int]:
    block_ids = pool.allocate(count)
    assert block_ids is not None
    return block_ids


def take_named(pool: BlockPool, *numbers: int) -> list[int]:
    block_ids = take(pool, len(numbers))
    for block_id, number in zip(block_ids, numbers, strict=True):
        pool.register(block_id, name(number))
    return block_ids


def test_allocate_all_or_nothing() -> None:
    pool = Pool(4)
    first = take(pool, 3)
    assert first == [0, 1, 2]
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    assert take(pool, 0) == []
    assert take(pool, 1) == [3]
    assert pool.num_free == 0
    pool.release([*first, 3])
    pool.check_idle()
    assert pool.num_free == 4
    assert pool.evicted == []


def test_an_empty_pool_has_nothing_to_give() -> None:
    pool = Pool(0)
    assert pool.allocate(0) == []
    assert pool.allocate(1) is None
    pool.check_idle()


def test_unnamed_blocks_are_taken_before_cached_ones() -> None:
    pool = Pool(4)
    cached = take_named(pool, 1, 2)
    plain = take(pool, 2)
    pool.release(cached)
    pool.release(plain)
    assert sorted(take(pool, 2)) == sorted(plain)
    assert pool.evicted == []
    assert take(pool, 1) == [cached[1]]
    assert pool.evicted == [(cached[1], name(2))]


def test_tails_are_evicted_before_heads_and_old_before_new() -> None:
    pool = Pool(6)
    old = take_named(pool, 1, 2, 3)
    new = take_named(pool, 4, 5, 6)
    pool.release(old)
    pool.release(new)
    assert take(pool, 6) == [*reversed(old), *reversed(new)]


def test_a_hit_makes_a_block_recent() -> None:
    pool = Pool(3)
    blocks = take_named(pool, 1, 2, 3)
    for block_id in blocks:
        pool.release([block_id])
    pool.acquire(pool.lookup([name(1)]))
    pool.release([blocks[0]])
    assert take(pool, 3) == [blocks[1], blocks[2], blocks[0]]


def test_lookup_returns_the_leading_run() -> None:
    pool = Pool(4)
    blocks = take_named(pool, 1, 2, 3)
    assert pool.lookup([name(1), name(2), name(9), name(3)]) == blocks[:2]
    assert pool.lookup([name(9), name(1)]) == []
    assert pool.lookup([]) == []
    assert pool.find(name(3)) == blocks[2]
    assert pool.find(name(9)) is None
    assert [pool.ref_count(block_id) for block_id in blocks] == [1, 1, 1]


def test_a_block_needs_both_counts_at_zero_to_return() -> None:
    pool = Pool(1)
    blocks = take_named(pool, 1)
    pool.pin(blocks)
    pool.release(blocks)
    assert (pool.num_free, pool.ref_count(0)) == (0, 0)
    pool.check_integrity()
    with pytest.raises(AssertionError, match="still held"):
        pool.check_idle()
    pool.unpin(blocks)
    assert pool.num_free == 1
    pool.check_idle()

    pool.pin(pool.lookup([name(1)]))
    pool.acquire(blocks)
    pool.unpin(blocks)
    assert (pool.num_free, pool.ref_count(0)) == (0, 1)
    pool.release(blocks)
    pool.check_idle()


def test_shared_blocks_count_every_holder() -> None:
    pool = Pool(2)
    blocks = take(pool, 2)
    pool.acquire(blocks, times=2)
    assert pool.ref_count(blocks[0]) == 3
    for _ in range(2):
        pool.release(blocks)
        assert pool.num_free == 0
    pool.release(blocks)
    assert pool.num_free == 2


def test_changes_are_net_of_each_other() -> None:
    pool = Pool(2)
    blocks = take_named(pool, 1, 2)
    assert pool.drain_changes() == ([name(1), name(2)], [])
    assert pool.drain_changes() == ([], [])
    pool.release(blocks)
    (block_id,) = take(pool, 1)
    pool.register(block_id, name(2))  # evicted and computed again
    assert pool.drain_changes() == ([], [])
    pool.register(take(pool, 1)[0], name(3))
    pool.release([blocks[0]])
    pool.release(take(pool, 1))  # evicts name(3), which came and went
    assert pool.drain_changes() == ([], [name(1)])


def test_nobody_finds_what_is_distrusted_though_it_is_held() -> None:
    pool = Pool(5)
    pinned, cached, held = take_named(pool, 1, 2, 3)
    (unnamed,) = take(pool, 1)
    pool.pin([pinned])
    pool.release([pinned, cached])
    pool.distrust([pinned, cached, held, unnamed])
    assert sorted(pool.evicted) == [(pinned, name(1)), (cached, name(2)), (held, name(3))], "peers find none of them"
    assert sorted(pool.drain_distrusted()) == [name(2), name(3)]
    assert pool.lookup([name(1)]) == [] and pool.is_distrusted(pinned)
    assert [pool.find(name(number)) for number in (1, 2, 3)] == [pinned, None, None], "its name is not free yet"
    pool.check_integrity()
    pool.distrust([pinned])
    pool.unpin([pinned])
    assert pool.evicted[3:] == [(pinned, name(1))] and pool.find(name(1)) is None, "what was published meanwhile"
    assert (pool.drain_distrusted(), pool.drain_distrusted()) == ([name(1)], [])
    pool.release([held, unnamed])
    assert pool.drain_changes() == ([], []), "they came and went"
    pool.check_idle()


def test_a_pinned_block_that_a_request_holds_loses_its_name_with_its_last_pin() -> None:
    pool = Pool(1)
    blocks = take_named(pool, 1)
    pool.pin(blocks * 2)
    pool.distrust(blocks)
    pool.unpin(blocks)
    assert pool.find(name(1)) == blocks[0]
    pool.unpin(blocks)
    assert pool.find(name(1)) is None and pool.num_free == 0


def test_what_is_pinned_keeps_its_name_when_all_else_is_evicted() -> None:
    pool = Pool(4)
    blocks = take_named(pool, 1, 2, 3)
    pool.pin(blocks[:1])
    pool.release(blocks)
    pool.release(take(pool, 3))
    assert pool.lookup([name(1), name(2)]) == blocks[:1]
    assert {block_id for block_id, _ in pool.evicted} == set(blocks[1:])
    pool.unpin(blocks[:1])
    pool.check_idle()


def test_misuse_is_noticed() -> None:
    pool = Pool(2)
    with pytest.raises(AssertionError, match="given back more often"):
        pool.release([0])
    with pytest.raises(AssertionError, match="given back more often"):
        pool.unpin([0])
    with pytest.raises(AssertionError, match="is free"):
        pool.acquire([0])
    with pytest.raises(AssertionError, match="is free"):
        pool.pin([1])
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.register(0, name(1))
    pool.check_idle()
    blocks = take_named(pool, 1)
    with pytest.raises(AssertionError, match="has a name"):
        pool.register(blocks[0], name(2))
    with pytest.raises(AssertionError, match=f"the name of block {blocks[0]}"):
        pool.register(take(pool, 1)[0], name(1))
    pool.check_integrity()


def test_check_integrity_finds_what_is_broken() -> None:
    pool = Pool(2)
    pool._free.append(1)
    with pytest.raises(AssertionError, match="twice"):
        pool.check_integrity()
    pool = Pool(2)
    pool._pins[1] = -1
    with pytest.raises(AssertionError, match="block 1 has 0 request references and -1 pins"):
        pool.check_integrity()
    pool = Pool(2)
    pool._request_refs[1] = 1
    with pytest.raises(AssertionError, match="block 1 is"):
        pool.check_integrity()
    pool = Pool(2)
    pool._free.remove(0)
    with pytest.raises(AssertionError, match="block 0 is"):
        pool.check_integrity()
    pool = Pool(2)
    pool._block_hashes[0] = name(1)
    with pytest.raises(AssertionError, match="free block 0 has a name"):
        pool.check_integrity()
    pool = Pool(2)
    pool._evictable[pool._free.pop()] = None
    with pytest.raises(AssertionError, match="evictable block 0 has no name"):
        pool.check_integrity()
    pool = Pool(2)
    take_named(pool, 1)
    pool._index[name(1)] = 1
    with pytest.raises(AssertionError, match="block 0 is not in the index"):
        pool.check_integrity()
    pool = Pool(2)
    take_named(pool, 1)
    pool._index[name(2)] = 0
    with pytest.raises(AssertionError, match="the index has 2 names"):
        pool.check_integrity()


class NaivePool:
    """A model of the pool with the same rules, made of lists and searches."""

    def __init__(self, num_blocks: int) -> None:
        self.refs = dict.fromkeys(range(num_blocks), 0)
        self.pins = dict(self.refs)
        self.names: dict[int, BlockHash] = {}
        self.released: list[int] = []  # named and held by nobody, oldest first
        self.told: set[BlockHash] = set()  # names at the last drain
        self.distrusted: set[int] = set()
        self.lost: list[BlockHash] = []

    def held(self, block_id: int) -> bool:
        return self.refs[block_id] > 0 or self.pins[block_id] > 0

    @property
    def num_free(self) -> int:
        return sum(not self.held(block_id) for block_id in self.refs)

    def allocate(self, block_ids: list[int]) -> None:
        """Takes the blocks that the real pool took, after checking that its choice was right."""
        unnamed = {block_id for block_id in self.refs if not self.held(block_id) and block_id not in self.names}
        num_plain = min(len(block_ids), len(unnamed))
        assert set(block_ids[:num_plain]) <= unnamed
        evicted = self.released[: len(block_ids) - num_plain]
        assert block_ids[num_plain:] == evicted
        for block_id in evicted:
            self.released.remove(block_id)
            del self.names[block_id]
        for block_id in block_ids:
            self.refs[block_id] = 1

    def take(self, counts: dict[int, int], block_ids: list[int]) -> None:
        for block_id in block_ids:
            if block_id in self.released:
                self.released.remove(block_id)
            counts[block_id] += 1

    def give_back(self, counts: dict[int, int], block_ids: list[int]) -> None:
        for block_id in reversed(block_ids):
            counts[block_id] -= 1
            if not self.held(block_id) and block_id in self.names:
                self.released.append(block_id)
        self.forget_distrusted()

    def forget_distrusted(self) -> None:
        for block_id in [i for i in self.distrusted if not self.pins[i]]:
            self.distrusted.remove(block_id)
            self.lost.append(self.names.pop(block_id))
            if block_id in self.released:
                self.released.remove(block_id)


class Run:
    """One random history, applied to both pools."""

    def __init__(self, seed: int, num_blocks: int) -> None:
        self.rng = random.Random(seed)
        self.pool = Pool(num_blocks)
        self.naive = NaivePool(num_blocks)
        self.tables: list[list[int]] = []
        self.pinned: list[list[int]] = []

    def step(self) -> None:
        takes = (self.allocate, self.hit, self.pin, self.register)
        self.rng.choice((*takes, self.release, self.unpin, self.distrust, self.other))()
        assert self.pool.num_free == self.naive.num_free
        assert {i: self.pool.hash_of(i) for i in self.naive.names} == self.naive.names
        assert all(self.pool.ref_count(i) == count for i, count in self.naive.refs.items())
        self.pool.check_integrity()

    def allocate(self) -> None:
        count = self.rng.randrange(6)
        block_ids = self.pool.allocate(count)
        if block_ids is None:
            assert count > self.naive.num_free
            return
        self.naive.allocate(block_ids)
        self.tables.append(block_ids)

    def hit(self) -> None:
        wanted = [name(self.rng.randrange(12)) for _ in range(4)]
        found = self.pool.lookup(wanted)
        assert [self.naive.names[i] for i in found] == wanted[: len(found)]
        if len(found) < len(wanted):
            trusted = {name for i, name in self.naive.names.items() if i not in self.naive.distrusted}
            assert wanted[len(found)] not in trusted
        self.pool.acquire(found)
        self.naive.take(self.naive.refs, found)
        self.tables.append(found)

    def release(self) -> None:
        if self.tables:
            block_ids = self.tables.pop(self.rng.randrange(len(self.tables)))
            self.pool.release(block_ids)
            self.naive.give_back(self.naive.refs, block_ids)

    def pin(self) -> None:
        candidates = [i for i in self.naive.refs if self.naive.held(i) or i in self.naive.names]
        block_ids = self.rng.sample(candidates, min(2, len(candidates)))
        self.pool.pin(block_ids)
        self.naive.take(self.naive.pins, block_ids)
        self.pinned.append(block_ids)

    def unpin(self) -> None:
        if self.pinned:
            block_ids = self.pinned.pop(self.rng.randrange(len(self.pinned)))
            self.pool.unpin(block_ids)
            self.naive.give_back(self.naive.pins, block_ids)

    def register(self) -> None:
        unnamed = [i for i in self.naive.refs if self.naive.held(i) and i not in self.naive.names]
        for block_id in self.rng.sample(unnamed, min(3, len(unnamed))):
            block_hash = name(self.rng.randrange(12))
            if block_hash not in self.naive.names.values():
                self.pool.register(block_id, block_hash)
                self.naive.names[block_id] = block_hash

    def distrust(self) -> None:
        block_ids = self.rng.sample(list(self.naive.refs), min(2, len(self.naive.refs)))
        self.pool.distrust(block_ids)
        self.naive.distrusted |= {i for i in block_ids if i in self.naive.names}
        self.naive.forget_distrusted()

    def other(self) -> None:
        assert sorted(self.pool.drain_distrusted()) == sorted(self.naive.lost)
        self.naive.lost.clear()
        names = set(self.naive.names.values())
        stored, removed = self.pool.drain_changes()
        assert (set(stored), set(removed)) == (names - self.naive.told, self.naive.told - names)
        self.naive.told = names

    def finish(self) -> None:
        while self.tables:
            self.release()
        while self.pinned:
            self.unpin()
        self.pool.check_idle()


@pytest.mark.parametrize("seed", range(20))
def test_random_history_agrees_with_the_naive_model(seed: int) -> None:
    run = Run(seed, num_blocks=1 + seed)
    for _ in range(300):
        run.step()
    run.finish()
