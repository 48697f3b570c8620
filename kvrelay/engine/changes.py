"""What has happened in an engine since its last `StepResult`, in the order of happening."""

from dataclasses import dataclass, field

from kvrelay.engine.request import Admission, PinnedBlock, PromptOutput, RequestFailure, RequestOutput


@dataclass(slots=True)
class Changes:
    """The lists that a `StepResult` has as tuples."""

    admissions: list[Admission] = field(default_factory=list)
    prompts: list[PromptOutput] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)
    failures: list[RequestFailure] = field(default_factory=list)
    named: list[PinnedBlock] = field(default_factory=list)
    progress: list[tuple[str, int]] = field(default_factory=list)
    load: bool = False  # the load changed without anything else to tell

    def any(self) -> bool:
        events = self.admissions or self.prompts or self.outputs or self.failures or self.named or self.progress
        return bool(events) or self.load
