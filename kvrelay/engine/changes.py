"""What has happened in an engine since its last `StepResult`, in the order of happening."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvrelay.core.block_hash import BlockHash
from kvrelay.core.named_block import NamedBlock
from kvrelay.engine.request import (
    Admission,
    EngineLoad,
    PromptOutput,
    RequestFailure,
    RequestOutput,
    StepResult,
)


@dataclass(slots=True)
class Changes:
    """The lists that a `StepResult` has as tuples."""

    admissions: list[Admission] = field(default_factory=list)
    prompts: list[PromptOutput] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)
    failures: list[RequestFailure] = field(default_factory=list)
    named: list[NamedBlock] = field(default_factory=list)
    progress: list[tuple[str, int]] = field(default_factory=list)
    load: bool = False  # the load changed without anything else to tell

    def any(self) -> bool:
        events = self.admissions or self.prompts or self.outputs or self.failures or self.named or self.progress
        return bool(events) or self.load

    def take(self, stored: Sequence[BlockHash], removed: Sequence[BlockHash], load: EngineLoad) -> StepResult:
        """All of it, which is forgotten here."""
        result = StepResult(
            admissions=tuple(self.admissions),
            prompts=tuple(self.prompts),
            outputs=tuple(self.outputs),
            failures=tuple(self.failures),
            named=tuple(self.named),
            progress=tuple(self.progress),
            stored=tuple(stored),
            removed=tuple(removed),
            load=load,
        )
        for events in (self.admissions, self.prompts, self.outputs, self.failures, self.named, self.progress):
            events.clear()
        self.load = False
        return result
