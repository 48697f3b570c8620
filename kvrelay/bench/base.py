"""The values that the parts of the benchmark exchange, and the seam to a server.

Invariant: all times are seconds of one monotonic clock in this process; a server's clock is never read.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

CANCELLED = "cancelled"  # the kind of failure of a request that the end of the run cut off

TokenPrompt: TypeAlias = tuple[int, ...]
ChatPrompt: TypeAlias = tuple[tuple[str, str], ...]  # (role, content)
Prompt: TypeAlias = TokenPrompt | str | ChatPrompt
PromptFormat: TypeAlias = Literal["token_ids", "text", "chat"]


def messages_of(prompt: Prompt) -> ChatPrompt:
    """Returns the messages of a chat prompt, none of another one."""
    return tuple(part for part in prompt if isinstance(part, tuple))


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a prompt of `length` tokens; two segments of the same name begin with the same tokens."""

    name: str
    length: int


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One request as a workload describes it. `segments` are what its prompt adds to the conversation so far, or `text`
    is all of its prompt."""

    segments: tuple[Segment, ...]
    max_tokens: int
    kind: str = ""  # with several kinds in a run there are also figures for each
    text: str = ""


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason of a failure. `kind` is short and countable ("http 429", "timeout"); `message` is for a person."""

    kind: str
    message: str


@dataclass(slots=True)
class Answer:
    """All that comes back for one request, filled in as it arrives; a failed or cancelled request keeps what it had.

    `arrivals` are the times of the pieces of output; pieces that came in one read have the same. A piece is usually one
    token; text that waits for the rest of a character comes with a later piece. `num_output_tokens` is the server's
    count (usage, or as many ids as it has sent), None where it sends none. `text` and `token_ids` are those of a whole
    answer.
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
        """Returns the server's count, or without one the number of pieces."""
        return len(self.arrivals) if self.num_output_tokens is None else self.num_output_tokens


@dataclass(frozen=True, slots=True)
class Generation:
    """Sampling options and timeout, in seconds, of every request of a run. A `top_k` of 0 and a `top_p` of 1 are not
    sent, since OpenAI's own servers refuse the one, and others have defaults of their own for both."""

    temperature: float
    ignore_eos: bool
    timeout: float
    top_k: int = 0
    top_p: float = 1.0


# Sends one request and fills in its answer until the stream ends; cancelling it ends the request at the server. What
# server or network do to the request is told in the answer, never raised.
Send: TypeAlias = Callable[[Answer], Awaitable[None]]


class Client(Protocol):
    """A connection to one server."""

    async def resolve_model(self, wanted: str) -> str:
        """Chooses the model of all later requests and returns its name. Must be called first. `wanted` is empty for the
        only model that is served.

        Raises UnavailableError when nothing answers, UnknownModelError when the model is not served there, or when none
        is wanted and not exactly one is served.
        """
        ...

    async def prepare(self, prompt: Prompt, max_tokens: int) -> Send:
        """Encodes one streamed request and returns the function that sends it. Yields to the loop while it encodes a
        long prompt, so that other streams are read."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One measured request. Times are seconds since the load began."""

    index: int
    kind: str
    scheduled: float  # when it was to be sent
    due: float  # when it could be sent: `scheduled`, or when its place became free if that was later
    sent: float  # what it is later than `due` is the client's delay
    arrivals: Sequence[float]
    finished: float
    num_drawn_tokens: int  # of the prompt as it was made; as text it may be more or fewer; 0 of one that was given
    num_prompt_tokens: int
    num_output_tokens: int
    num_wanted_tokens: int
    counted_by: Literal["usage", "chunks"]
    num_cached_tokens: int | None
    failure: Failure | None
    is_later_turn: bool = False  # of a conversation: it waited for the answer to the turn before

    @property
    def was_short(self) -> bool:
        """Tells that it ended well with fewer tokens than asked for."""
        return self.failure is None and self.num_output_tokens < self.num_wanted_tokens

    @property
    def ttft(self) -> float:
        """Returns the time to the first piece; there must be one."""
        return self.arrivals[0] - self.sent

    @property
    def e2e(self) -> float:
        return self.arrivals[-1] - self.sent

    @property
    def tpot(self) -> float | None:
        """Returns the mean time of a token after the first one, or None for a single token. How many tokens the first
        piece holds is not known over HTTP: with more than one, this is too little."""
        if self.num_output_tokens < 2 or len(self.arrivals) < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.num_output_tokens - 1)

    @property
    def itls(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]
