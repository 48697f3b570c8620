"""A launched step for runners that carry out a plan at once."""

from kvrelay.engine.plan import ModelRunnerOutput


class FinishedStep:
    """A `LaunchedStep` without anything to wait for."""

    __slots__ = ("_output",)
    only_samples = False

    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def collect(self) -> ModelRunnerOutput:
        return self._output
