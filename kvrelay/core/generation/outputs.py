"""What a sequence produces: tokens, their log-probabilities, and why it ended. Engine, nodes and router share it."""

from dataclasses import dataclass
from enum import Enum

from kvrelay.core.record import record


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, from the unmodified logits. The most likely token has `rank` 1; `top` has the
    most likely tokens (id, log-probability), best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@record
class TokenOutput:
    """New tokens of output `index` of a request, in order. If a token ended the output, it is `stop_token_id`, and the
    last of `token_ids`."""

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
