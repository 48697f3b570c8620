"""What a sequence produces: tokens, their log-probabilities, and why it ended. Shared by engine, nodes and router."""

from dataclasses import dataclass
from enum import Enum


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, from the unmodified logits. `rank` 1 is the most likely token; `top` is best
    first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """New tokens of output `index` of a request, in order. `stop_token_id` is the token that ended it, if one did (it
    is the last of `token_ids`)."""

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
