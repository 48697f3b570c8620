"""The steps that were launched but not collected yet, and the blocks that were released meanwhile.

Invariant: a block that a launched step may read or write stays in use until that step is collected, whoever releases
it. The step runs on a device, concurrently with transfers that write to blocks as soon as they get them.
"""

from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.plan import SchedulerOutput
from kvrelay.engine.runner import LaunchedStep, Runner
from kvrelay.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A launched step. `sequences` are those of the plan, in its order; `launched_at` is in seconds of the engine's
    clock; the blocks in `pinned` are unpinned when the step ends."""

    plan: SchedulerOutput
    sequences: SequenceOf[Sequence]
    launched: LaunchedStep
    launched_at: float
    pinned: list[SequenceOf[int]]


class StepsInFlight:
    """A queue of launched steps, oldest first. A block released while any are in flight stays pinned until the newest
    of them ends: that is simpler than tracking which step uses which block, and delays the block by one step."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._steps: deque[StepInFlight] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def newest(self) -> StepInFlight | None:
        """Returns the step launched last, or None if none is in flight."""
        return self._steps[-1] if self._steps else None

    def release(self, block_ids: SequenceOf[int]) -> None:
        """Releases blocks like `BlockPool.release`, but keeps them pinned until every step launched so far is
        collected."""
        if self._steps:
            self._pool.pin(block_ids)
            self._steps[-1].pinned.append(block_ids)
        self._pool.release(block_ids)

    def launch(self, runner: Runner, plan: SchedulerOutput, sequences: SequenceOf[Sequence], now: float) -> None:
        """Launches a step and adds it. The scheduler has pinned the blocks that the plan's copies read; they are
        unpinned when this step ends, or here if launching fails, be it by a keyboard interrupt. The pin of `release`,
        until the steps before have ended, is enough then: what a GPU has been given of this step runs before any later
        one."""
        sources = [source for source, _ in plan.copies]
        launched: LaunchedStep | None = None
        try:
            launched = runner.launch(plan)
        finally:
            if launched is None:
                self._pool.unpin(sources)
        self._steps.append(StepInFlight(plan, sequences, launched, now, [sources]))
        row = 0
        for entry, sequence in zip(plan.scheduled, sequences, strict=True):
            sequence.num_launched_tokens += entry.num_scheduled_tokens
            if entry.rows:
                sequence.num_unknown_tokens += 1
                sequence.sampled_row = row
                row += len(entry.rows)

    def pop(self) -> StepInFlight:
        """Removes and returns the oldest step. The caller collects it and then calls `end`, whether or not that
        failed."""
        return self._steps.popleft()

    def end(self, step: StepInFlight) -> bool:
        """Updates the counters of a step's sequences and unpins its blocks. Returns whether there were any."""
        for entry, sequence in zip(step.plan.scheduled, step.sequences, strict=True):
            sequence.num_launched_tokens -= entry.num_scheduled_tokens
            sequence.num_unknown_tokens -= bool(entry.rows)
        for block_ids in step.pinned:
            self._pool.unpin(block_ids)
        return any(step.pinned)
