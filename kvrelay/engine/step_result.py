"""What an engine tells its node: all that has changed since it was last told, in order."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from kvrelay.core.errors import KVRelayError, NotFiniteError
from kvrelay.core.generation.outputs import TokenOutput
from kvrelay.core.generation.prompt_logprobs import PromptLogprobs
from kvrelay.core.kv.block_hash import BlockHash
from kvrelay.core.kv.named_block import NamedBlock
from kvrelay.core.node_report import NodeLoad
from kvrelay.core.record import record


@dataclass(frozen=True, slots=True)
class Reservation:
    """The report that a receiving request has blocks for all its given tokens. The KV of the first `num_cached_tokens`
    is here; the blocks in `missing`, in order, wait for theirs.
    """

    request_id: str
    num_cached_tokens: int
    missing: tuple[NamedBlock, ...]


@record
class SequenceOutput:
    """New tokens of one output of a request."""

    request_id: str
    output: TokenOutput


@dataclass(frozen=True, slots=True)
class PromptOutput:
    """The report that a request's given tokens are computed. `num_cached_tokens` of them were found by name when it was
    scheduled; what a preempted request then finds of its own is not counted."""

    request_id: str
    num_cached_tokens: int
    prompt_logprobs: PromptLogprobs


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """The report that a request has failed. The engine holds nothing for it any more. `is_not_finite`: its logits are
    not finite."""

    request_id: str
    message: str
    is_not_finite: bool = False

    @property
    def error(self) -> KVRelayError:
        """Returns it as an error for others to hear."""
        return NotFiniteError(self.message) if self.is_not_finite else KVRelayError(self.message)


@dataclass(frozen=True, slots=True)
class EngineLoad(NodeLoad):
    """Counts at the end of a step: those that a node reports to routers, and more for the node itself.
    `first_lacking`: the arrival number of the first sequence that lacks blocks while others may overtake it, 0 if none
    does."""

    num_prefilled_tokens: int = 0  # computed in chunks of more than one token, since the start
    prefill_seconds: float = 0.0  # that these steps took
    first_lacking: int = 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """Everything that changed since the last result, in order within each tuple.

    `progress` has pairs (request id, number of leading blocks that have their names) of PRODUCE requests. `stored` and
    `removed` are the names that the pool has gained and lost. The blocks in `named` are pinned for the node to publish:
    new blocks, and with `publish_hits` those found by name. No block here has the names in `distrusted` any more,
    because the content under them, here or in the store, may be wrong.
    """

    reservations: tuple[Reservation, ...]
    prompts: tuple[PromptOutput, ...]
    outputs: tuple[SequenceOutput, ...]
    failures: tuple[RequestFailure, ...]
    named: tuple[NamedBlock, ...]
    progress: tuple[tuple[str, int], ...]
    distrusted: tuple[BlockHash, ...]
    stored: tuple[BlockHash, ...]
    removed: tuple[BlockHash, ...]
    load: EngineLoad

    @property
    def can_wait(self) -> bool:
        """Tells whether the result may be delivered late: all it has for requests is further tokens of outputs that
        continue."""
        if self.reservations or self.prompts or self.failures or self.progress:
            return False
        return all(item.output.finish_reason is None for item in self.outputs)


@dataclass(slots=True)
class Changes:
    """The events of the next `StepResult`, as lists under the same names."""

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
        return self.load_changed or any(self._lists().values())

    def take(self, stored: Sequence[BlockHash], removed: Sequence[BlockHash], load: EngineLoad) -> StepResult:
        """Returns all events as a `StepResult` and clears them here."""
        lists = self._lists()
        events = {name: tuple(items) for name, items in lists.items()}
        for items in lists.values():
            items.clear()
        self.load_changed = False
        return StepResult(**events, stored=tuple(stored), removed=tuple(removed), load=load)

    def _lists(self) -> dict[str, list[Any]]:
        return {name: getattr(self, name) for name in _EVENTS}


_EVENTS = tuple(item.name for item in fields(Changes) if item.name != "load_changed")
