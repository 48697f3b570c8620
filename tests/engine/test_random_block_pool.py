"""Random histories of a BlockPool, compared with a model of lists and searches."""

import random

import pytest

from kvrelay.core.kv.block_hash import BlockHash
from tests.engine.recording_pool import Pool, name


class NaivePool:
    """A model of the pool with the same rules, made of lists and searches."""

    def __init__(self, num_blocks: int) -> None:
        self.refs = dict.fromkeys(range(num_blocks), 0)
        self.pins = dict(self.refs)
        self.names: dict[int, BlockHash] = {}
        self.released: list[int] = []  # named and held by nobody, oldest first
        self.told: set[BlockHash] = set()  # names at the last drain
        self.distrusted: set[int] = set()
        self.tainted: set[int] = set()
        self.lost: list[BlockHash] = []
        self.behind_another: set[int] = set()  # numbers whose names are known to follow that of half the number

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
        self.tainted = set(filter(self.held, self.tainted))

    def followers(self) -> set[int]:
        """Returns the numbers of names that are known to follow another: those that have a block, or one behind them
        that has."""
        present = set(self.names.values())
        for number in sorted(self.behind_another, reverse=True):  # those behind it first
            if name(number) not in present and not self.behind_another & {2 * number, 2 * number + 1}:
                self.behind_another.remove(number)
        return self.behind_another


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
        assert {i for i in self.naive.refs if self.pool.has_tainted([i])} == self.naive.tainted
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
        taken = self.naive.names.keys() | self.naive.tainted
        unnamed = [i for i in self.naive.refs if self.naive.held(i) and i not in taken]
        for block_id in self.rng.sample(unnamed, min(3, len(unnamed))):
            number = self.rng.randrange(12)
            present = set(self.naive.names.values())
            if name(number) not in present and (number == 0 or name(number // 2) in present):
                self.pool.register(block_id, name(number), parent=name(number // 2) if number else None)
                followers = self.naive.followers()
                if number:
                    followers.add(number)
                self.naive.names[block_id] = name(number)

    def distrust(self) -> None:
        doomed = set(self.rng.sample(range(12), self.rng.randrange(3)))
        self.pool.distrust(map(name, sorted(doomed)))
        for child in range(1, 12):  # those before it first
            if child // 2 in doomed and child in self.naive.followers():
                doomed.add(child)
        present = set(self.naive.names.values())
        self.naive.lost += [name(number) for number in doomed if name(number) not in present]
        block_ids = {i for i, block_hash in self.naive.names.items() if block_hash in map(name, doomed)}
        self.naive.distrusted |= block_ids
        self.naive.tainted |= block_ids
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
