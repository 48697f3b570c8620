"""The seam between the engine and what carries its plans out, on whatever device that is.

Invariant: steps are carried out in the order in which they were launched, and collected in that order, each once.
"""

from typing import Protocol

from kvrelay.engine.plan import ModelRunnerOutput, SchedulerOutput


class LaunchedStep(Protocol):
    """A step under way. Until it is collected it may read and write every block of its plan."""

    @property
    def only_samples(self) -> bool:
        """The KV of all its tokens lies in the blocks; what is left, and takes time, is to sample."""
        ...

    def collect(self) -> ModelRunnerOutput:
        """Waits for the step to end. Raises KVRelayError when it failed; its sequences then fail and the engine goes
        on."""
        ...


class Runner(Protocol):
    """Carries out plans: copies blocks, writes KV, samples. Called by the engine's thread only."""

    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        """Enqueues a step and returns at once where there is a device to wait for. At most one other step has been
        launched and not been collected; an `input_row` of `plan` names a row of that one. Should that row fail, this
        step runs on any valid token, and nobody reads what it samples there.

        Raises KVRelayError when this plan cannot be carried out: nothing of it is under way then, its sequences fail,
        and no later plan refers to it.
        """
        ...
