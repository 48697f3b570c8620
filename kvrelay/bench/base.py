"""What the parts of the benchmark hand to each other, and the seam to a server.

Invariant: all times are seconds of one monotonic clock in this process; a server's clock is never asked.
"""

from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

CANCELLED = "cancelled"  # the kind of failure of a request that the end of the run cut off

TokenPrompt: TypeAlias = tuple[int, ...]
ChatPrompt: TypeAlias = tuple[tuple[str, str], ...]  # (role, content)
Prompt: TypeAlias = TokenPrompt | str | ChatPrompt
# For how a prompt is written: token ids, one text, or the messages of a chat.
PromptFormat: TypeAlias = Literal["token_ids", "text", "chat"]


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of `length` tokens; two of the same name begin with the same tokens."""

    name: str
    length: int


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One request as a workload describes it: what its prompt adds to the conversation so far, and how much it asks."""

    segments: tuple[Segment, ...]
    max_tokens: int
    kind: str = ""  # results are also given for each kind when there are several


@dataclass(frozen=True, slots=True)
class Failure:
    """`kind` is short and countable ("http 429", "timeout"); `message` is for a person."""

    kind: str
    message: str


@dataclass(slots=True)
class Answer:
    """What comes back for one request, filled in while it comes; a failed or cancelled request keeps what it had.

    `arrivals`: when each piece of output came. A piece is usually one token; text that waits for the rest of a
    character comes with a later one. `num_output_tokens` is the server's count (usage), None where it sends none.
    """

    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    finished: float | None = None
    num_output_tokens: int | None = None
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    text: str = ""
    token_ids: tuple[int, ...] = ()  # empty where the server sends text only
    failure: Failure | None = None

    @property
    def num_tokens(self) -> int:
        """By the server's count, else a token a piece."""
        return len(self.arrivals) if self.num_output_tokens is None else self.num_output_tokens


@dataclass(frozen=True, slots=True)
class Generation:
    """How every request of a run is to be answered. `timeout` is seconds."""

    temperature: float
    ignore_eos: bool
    timeout: float


class Client(Protocol):
    """One server. Whatever it or the network does to a request is told in the `Answer`, never raised."""

    async def resolve_model(self, wanted: str) -> str:
        """The name to ask for from now on; `wanted` is empty for the only model served. Call it first.

        Raises UnavailableError when nothing answers, UnknownModelError when the model is not served there.
        """
        ...

    async def generate(self, prompt: Prompt, max_tokens: int, answer: Answer) -> None:
        """One streamed request, into `answer`. Cancelling it ends the request at the server."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One measured request. Times are seconds since the load began."""

    index: int
    kind: str
    scheduled: float  # when it was to be sent; later than that is the client's delay, or its limit on concurrency
    sent: float
    arrivals: tuple[float, ...]
    finished: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_wanted_tokens: int
    counted_by: Literal["usage", "chunks"]
    num_cached_tokens: int | None = None
    failure: Failure | None = None

    @property
    def ttft(self) -> float:
        """Only for a request with output."""
        return self.arrivals[0] - self.sent

    @property
    def e2e(self) -> float:
        return self.arrivals[-1] - self.sent

    @property
    def tpot(self) -> float | None:
        """Mean time of a token after the first one; None for one token."""
        if self.num_output_tokens < 2 or len(self.arrivals) < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.num_output_tokens - 1)

    @property
    def itls(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]
