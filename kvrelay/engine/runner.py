"""The seam between the engine and the runners that carry out its plans on a CPU or a GPU.

Invariant: steps are carried out in the order in which they were launched, and collected in that order, each once.
"""

from typing import Protocol

from kvrelay.engine.plan import ModelRunnerOutput, SchedulerOutput


class LaunchedStep(Protocol):
    """A launched step. Until it is collected it may read and write every block of its plan."""

    @property
    def only_samples(self) -> bool:
        """Tells whether the KV of all tokens is written, so that only sampling is left."""
        ...

    def collect(self) -> ModelRunnerOutput:
        """Waits for the step and returns its result. Raises KVRelayError if it failed; the engine then fails its
        sequences and continues."""
        ...


class Runner(Protocol):
    """What carries out plans: it copies blocks, writes KV and samples. Only the engine thread calls it."""

    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        """Starts a step. On a GPU it returns at once. At most one other step is in flight; an `input_row` of `plan`
        refers to a row of that step. If that row fails, this step computes with any valid token instead, and nobody
        reads what it samples for that sequence.

        Raises KVRelayError if the plan cannot be carried out. Nothing of it is then in flight, its sequences fail, and
        no later plan refers to it.
        """
        ...
