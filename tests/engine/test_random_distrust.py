"""Random histories in which named blocks are damaged and readers refuse them: nobody finds what derives from a refused
damage any more, whoever computed it, and whatever was pinned, forgotten or computed again in between."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvrelay.core.kv.block_hash import BlockHash
from kvrelay.engine.plan import SchedulerOutput
from kvrelay.engine.request import KVRole
from kvrelay.engine.runner import LaunchedStep, Runner
from tests.engine.harness import BLOCK_SIZE, Harness, prompt_of, request

PROMPT = prompt_of(6 * BLOCK_SIZE)


class TracingRunner:
    """A runner in front of another that notes in `damages` from which of them the content of each block derives."""

    def __init__(self, runner: Runner, damages: list[set[int]]) -> None:
        self._runner = runner
        self._damages = damages

    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        for source, target in plan.copies:
            self._damages[target] = self._damages[source].copy()
        for entry in plan.scheduled:
            first, offset = divmod(entry.start, BLOCK_SIZE)
            end = -(-(entry.start + entry.num_scheduled_tokens) // BLOCK_SIZE)
            for place in range(first, end):
                self._write(entry.block_table[: place + 1], is_new=place > first or offset == 0)
        return self._runner.launch(plan)

    def _write(self, block_ids: Sequence[int], *, is_new: bool) -> None:
        """Notes that the last of these blocks is written by reading those before it."""
        *read, block_id = block_ids
        if is_new:
            self._damages[block_id] = set()
        self._damages[block_id].update(*(self._damages[before] for before in read))


class _History:
    """An engine whose requests begin with the same prompt, and whose offered blocks stay pinned for some moves."""

    def __init__(self, seed: int, *, run_ahead: bool) -> None:
        self.rng = random.Random(seed)
        num_blocks = self.rng.choice((20, 40))
        self.damages: list[set[int]] = [set() for _ in range(num_blocks)]  # of each block; they are numbered
        harness = Harness(
            num_blocks=num_blocks,
            max_num_seqs=4,
            max_num_batched_tokens=self.rng.choice((BLOCK_SIZE, BLOCK_SIZE, 3 * BLOCK_SIZE)),
            publish=True,
            publish_hits=seed % 2 == 0,
            run_ahead=run_ahead,
            wrap=lambda runner: TracingRunner(runner, self.damages),
        )
        self.engine = harness.engine
        self.pool = harness.engine.pool
        self.pinned: list[list[int]] = []
        self.request_ids: list[str] = []
        self.unread: list[tuple[int, BlockHash, int]] = []  # damages, with the name and the block that was damaged
        self.refused: set[int] = set()
        self.num_damages = 0

    def move(self) -> None:
        moves = (self.add, self.damage, self.refuse, self.step, self.end, self.unpin)
        self.rng.choices(moves, (3, 4, 2, 6, 1, 2))[0]()

    def add(self) -> None:
        load = self.engine.load()
        if load.num_requests_running + load.num_requests_waiting >= 4:
            return
        request_id = f"request-{len(self.request_ids)}"
        prompt = PROMPT[: self.rng.randrange(BLOCK_SIZE, len(PROMPT))]
        role = self.rng.choice((KVRole.LOCAL, KVRole.PRODUCE))
        item = request(request_id, prompt, self.rng.randrange(1, 12), role=role, n=self.rng.choice((1, 1, 2)))
        if self.rng.random() < 0.5:  # it computes all of its prompt, also what others have named
            item = replace(item, sampling=replace(item.sampling, prompt_logprobs=0))
        self.engine.add(item)
        self.request_ids.append(request_id)

    def damage(self) -> None:
        """Damages a block that readers fetch by its name."""
        names = [(name, block_id) for block_id in range(self.pool.num_blocks) if (name := self.pool.hash_of(block_id))]
        if names:
            name, block_id = self.rng.choice(names)
            self.num_damages += 1
            self.damages[block_id].add(self.num_damages)
            self.unread.append((self.num_damages, name, block_id))

    def refuse(self) -> None:
        """Lets a reader refuse a damaged block, if it is still that block."""
        if self.unread:
            damage, name, block_id = self.unread.pop(self.rng.randrange(len(self.unread)))
            if self.pool.hash_of(block_id) == name and damage in self.damages[block_id]:
                self.engine.distrust(name)
                self.refused.add(damage)

    def step(self) -> None:
        result, _ = self.engine.step()
        if result is not None and result.named:
            self.pinned.append([block.block_id for block in result.named])

    def end(self) -> None:
        if self.request_ids:
            end = self.rng.choice((self.engine.abort, self.engine.release_lease, self.engine.release_lease))
            end(self.rng.choice(self.request_ids[-6:]))

    def unpin(self) -> None:
        if self.pinned:
            self.engine.unpin(self.pinned.pop(self.rng.randrange(len(self.pinned))))

    def check(self) -> None:
        for block_id in range(self.pool.num_blocks):
            if self.pool.hash_of(block_id) is not None and not self.pool.is_distrusted(block_id):
                found = self.damages[block_id] & self.refused
                assert not found, f"block {block_id} is found, but derives from refused damages {found}"
        self.pool.check_integrity()

    def finish(self) -> None:
        for request_id in self.request_ids:
            self.engine.abort(request_id)
        self.engine.settle()
        while self.pinned:
            self.unpin()
        self.step()
        while self.pinned:
            self.unpin()
        self.engine.check_idle()


@pytest.mark.parametrize(
    ("run_ahead", "first_seed"),
    [*((False, first) for first in range(0, 200, 50)), *((True, first) for first in range(300, 500, 50))],
)
def test_nobody_finds_what_derives_from_a_refused_damage(*, run_ahead: bool, first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 50):
        history = _History(seed, run_ahead=run_ahead)
        for _ in range(120):
            history.move()
            history.check()
        history.finish()
