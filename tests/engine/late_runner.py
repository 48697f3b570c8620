"""A runner as slow as a device may be: a step runs when it is collected.

Invariant: steps are collected in the order in which they were launched, each once, and there are never more than two.
"""

from collections import deque
from collections.abc import Callable, Sequence

from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.plan import ModelRunnerOutput, SchedulerOutput
from kvrelay.engine.runner import Runner


class LateStep:
    only_samples = False

    def __init__(self, runner: "LateRunner", plan: SchedulerOutput) -> None:
        self._runner = runner
        self.plan = plan

    def collect(self) -> ModelRunnerOutput:
        assert self._runner.in_flight.popleft() is self
        return self._runner.inner.launch(self.plan).collect()


class LateRunner:
    """A runner that carries out the plans of `inner` when they are collected. `num_ahead` counts the steps that were
    launched while another was in flight."""

    def __init__(self, inner: Runner) -> None:
        self.inner = inner
        self.in_flight: deque[LateStep] = deque()
        self.num_ahead = 0

    def launch(self, plan: SchedulerOutput) -> LateStep:
        step = LateStep(self, plan)
        assert len(self.in_flight) < 2
        self.num_ahead += bool(self.in_flight)
        self.in_flight.append(step)
        return step

    def blocks_in_flight(self) -> set[int]:
        """Returns the blocks that the device may still read or write."""
        tables = [entry.block_table for step in self.in_flight for entry in step.plan.scheduled]
        copies = [copy for step in self.in_flight for copy in step.plan.copies]
        return {block_id for block_ids in (*tables, *copies) for block_id in block_ids}


class WatchedPool(BlockPool):
    """A pool that checks that it hands out no block which a step in flight may touch."""

    def __init__(self, num_blocks: int, runner: LateRunner, *, retract: Callable[[Sequence[int]], None]) -> None:
        super().__init__(num_blocks, retract=retract)
        self._runner = runner

    def allocate(self, count: int) -> list[int] | None:
        block_ids = super().allocate(count)
        touched = self._runner.blocks_in_flight().intersection(block_ids or ())
        assert not touched, f"blocks {sorted(touched)} are handed out while a step may touch them"
        return block_ids
