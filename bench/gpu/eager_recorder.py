"""A stand-in for CUDA graphs on machines without a GPU: a replay runs the step once more, over the same memory."""

from dataclasses import dataclass, field

from torch import Tensor

from kvrelay.engine.gpu.step_graphs import RecordedStep, Step


@dataclass(slots=True)
class EagerRecorder:
    """A `StepRecorder`. `replayed` lists the rows of each replayed step, padding included."""

    replayed: list[int] = field(default_factory=list)

    def record(self, step: Step) -> RecordedStep:
        step()
        return _Replay(step, self.replayed)


@dataclass(frozen=True, slots=True)
class _Replay:
    step: Step
    replayed: list[int]

    def replay(self) -> Tensor:
        hidden = self.step()
        self.replayed.append(len(hidden))
        return hidden
