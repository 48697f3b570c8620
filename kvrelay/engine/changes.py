"""What has happened in an engine since its last `StepResult`, in order."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvrelay.core.kv.block_hash import BlockHash
from kvrelay.core.kv.named_block import NamedBlock
from kvrelay.engine.request import (
    EngineLoad,
    PromptOutput,
    RequestFailure,
    Reservation,
    SequenceOutput,
    StepResult,
)


@dataclass(slots=True)
class Changes:
    """The events of the next `StepResult`, as lists."""

    reservations: list[Reservation] = field(default_factory=list)
    prompts: list[PromptOutput] = field(default_factory=list)
    outputs: list[SequenceOutput] = field(default_factory=list)
    failures: list[RequestFailure] = field(default_factory=list)
    named: list[NamedBlock] = field(default_factory=list)
    progress: list[tuple[str, int]] = field(default_factory=list)
    distrusted: list[BlockHash] = field(default_factory=list)
    load_changed: bool = False  # even if nothing else did

    def any(self) -> bool:
        """Tells whether there is anything to report."""
        return self.load_changed or any(self._lists())

    def take(self, stored: Sequence[BlockHash], removed: Sequence[BlockHash], load: EngineLoad) -> StepResult:
        """Returns all events as a `StepResult` and clears them here."""
        result = StepResult(
            reservations=tuple(self.reservations),
            prompts=tuple(self.prompts),
            outputs=tuple(self.outputs),
            failures=tuple(self.failures),
            named=tuple(self.named),
            progress=tuple(self.progress),
            distrusted=tuple(self.distrusted),
            stored=tuple(stored),
            removed=tuple(removed),
            load=load,
        )
        for events in self._lists():
            events.clear()
        self.load_changed = False
        return result

    def _lists(self) -> Iterator[list[Any]]:
        yield from (self.reservations, self.prompts, self.outputs, self.failures, self.named, self.progress)
        yield self.distrusted
