"""BlockPool: where blocks go, and which is evicted next."""

import pytest

from kvrelay.engine.block_pool import BlockPool
from tests.engine.recording_pool import Pool, name


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
    assert pool.retracted == []


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
    assert pool.retracted == []
    assert take(pool, 1) == [cached[1]]
    assert pool.retracted == [(cached[1], name(2))]


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
    pool.distrust(map(name, (1, 2, 3, 4)))
    assert sorted(pool.retracted) == [(pinned, name(1)), (cached, name(2)), (held, name(3))], "peers find none of them"
    assert sorted(pool.drain_distrusted()) == [name(2), name(3), name(4)], "the store may have one that no block has"
    assert pool.lookup([name(1)]) == [] and pool.is_distrusted(pinned)
    assert [pool.find(name(number)) for number in (1, 2, 3)] == [pinned, None, None], "its name is not free yet"
    pool.check_integrity()
    pool.distrust([name(1)])
    pool.unpin([pinned])
    assert pool.retracted[3:] == [(pinned, name(1))] and pool.find(name(1)) is None, "what was published meanwhile"
    assert (pool.drain_distrusted(), pool.drain_distrusted()) == ([name(1)], [])
    pool.release([held, unnamed])
    assert pool.drain_changes() == ([], []), "they came and went"
    pool.check_idle()


def test_a_block_stays_tainted_until_nobody_holds_it() -> None:
    pool = Pool(5)
    before, pinned, cached, held = take(pool, 4)
    for block_id, number, parent in ((before, 0, None), (pinned, 1, 0), (held, 3, 1), (cached, 2, 3)):
        pool.register(block_id, name(number), parent=None if parent is None else name(parent))
    pool.pin([pinned, pinned])
    pool.release([before, pinned, cached])
    pool.distrust([name(9), name(1)])
    assert pool.has_tainted([4, pinned]) and pool.has_tainted([held]), "which is behind it"
    assert not pool.has_tainted([before, cached]), "nobody holds it"
    assert pool.lookup([name(0), name(1)]) == [before]
    assert sorted(pool.drain_distrusted()) == [name(2), name(3), name(9)]
    pool.check_integrity()
    told = len(pool.retracted)
    pool.unpin([pinned])
    assert pool.retracted[told:] == [(pinned, name(1))], "the transfer may have published it again"
    pool.unpin([pinned])
    pool.release([held])
    assert not pool.has_tainted(range(5)) and pool.num_free == 5
    assert pool.drain_distrusted() == [name(1)] and pool.lookup([name(0)]) == [before]
    pool.check_idle()


def test_distrust_reaches_what_is_behind_an_evicted_block() -> None:
    pool = Pool(4)
    first, second, third, other = take(pool, 4)
    for block_id, number, parent in ((first, 1, None), (second, 2, 1), (third, 3, 2), (other, 4, 1)):
        pool.register(block_id, name(number), parent=None if parent is None else name(parent))
    pool.release([second])
    assert pool.allocate(1) == [second], "another request computes with it"
    pool.distrust([name(1)])
    assert [pool.find(name(number)) for number in (1, 3, 4)] == [None, None, None]
    assert pool.has_tainted([third]) and not pool.has_tainted([second])
    pool.release([first, second, third, other])
    pool.check_idle()


def test_a_name_is_behind_another_for_as_long_as_it_or_one_behind_it_has_a_block() -> None:
    pool = Pool(4)
    first, second, third, other = take(pool, 4)
    for block_id, number, parent in ((first, 1, None), (second, 2, 1), (third, 3, 2)):
        pool.register(block_id, name(number), parent=None if parent is None else name(parent))
    pool.release([second])
    pool.release([third])
    assert sorted(pool.allocate(2) or ()) == sorted([second, third]), "they lose their names"
    with pytest.raises(AssertionError, match="a name that no block has"):
        pool.register(other, name(3), parent=name(2))  # of which nothing is known any more
    for block_id, number in ((second, 2), (other, 3)):
        pool.register(block_id, name(number), parent=name(number - 1))
    pool.distrust([name(1)])
    assert [pool.find(name(number)) for number in (1, 2, 3)] == [None, None, None]
    pool.release([first, second, third, other])
    pool.check_idle()


def test_a_pinned_block_that_a_request_holds_loses_its_name_with_its_last_pin() -> None:
    pool = Pool(1)
    blocks = take_named(pool, 1)
    pool.pin(blocks * 2)
    pool.distrust([name(1)])
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
    assert {block_id for block_id, _ in pool.retracted} == set(blocks[1:])
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
