"""What a runner launches that carries a plan out at once."""

from kvrelay.engine.plan import ModelRunnerOutput


class FinishedStep:
    """Implements LaunchedStep: there is nothing to wait for."""

    __slots__ = ("_output",)
    only_samples = False

    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def collect(self) -> ModelRunnerOutput:
        return self._output
