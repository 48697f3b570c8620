"""How tokens are chosen: one frozen value that the client API, the router and the engine share."""

import math
from dataclasses import dataclass, field

from kvrelay.core.errors import InvalidRequestError

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LENGTH = 1024
MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request; `validate` names the first field that is wrong.

    Names and defaults follow the OpenAI API where it has the field and vLLM's extensions elsewhere. `top_k` 0 and
    `temperature` 0 mean off and greedy. `logprobs` k asks for the sampled token and the k most likely ones, from the
    unmodified logits. Randomness is a pure function of (seed, choice index, position); `seed` None lets the router
    draw one.
    """

    n: int = 1
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = field(default=())
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def validate(self, *, vocab_size: int) -> None:
        """Raises InvalidRequestError naming the field; called once, at the edge."""
        _in_range("n", self.n, 1, MAX_N)
        _at_least("max_tokens", self.max_tokens, 1)
        _at_least("min_tokens", self.min_tokens, 0)
        if self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})", field="min_tokens"
            )
        _in_range("temperature", self.temperature, 0.0, 100.0)
        _at_least("top_k", self.top_k, 0)
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequestError(f"top_p must be in (0, 1], got {self.top_p}", field="top_p")
        _in_range("min_p", self.min_p, 0.0, 1.0)
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0.0):
            raise InvalidRequestError(
                f"repetition_penalty must be above 0, got {self.repetition_penalty}", field="repetition_penalty"
            )
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for token_id, bias in self.logit_bias:
            _token_id("logit_bias", token_id, vocab_size)
            _in_range("logit_bias", bias, -100.0, 100.0)
        for token_id in self.stop_token_ids:
            _token_id("stop_token_ids", token_id, vocab_size)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(
                f"stop has {len(self.stop)} strings, at most {MAX_STOP_STRINGS} are allowed", field="stop"
            )
        for text in self.stop:
            if not 0 < len(text) <= MAX_STOP_STRING_LENGTH:
                raise InvalidRequestError(
                    f"stop strings must have 1 to {MAX_STOP_STRING_LENGTH} characters", field="stop"
                )
        if self.seed is not None:
            _in_range("seed", self.seed, 0, MAX_SEED)
        if self.logprobs is not None:
            _in_range("logprobs", self.logprobs, 0, min(MAX_LOGPROBS, vocab_size))
        if self.prompt_logprobs is not None:
            _in_range("prompt_logprobs", self.prompt_logprobs, 0, min(MAX_LOGPROBS, vocab_size))


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidRequestError(f"{name} must be between {low} and {high}, got {value}", field=name)


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise InvalidRequestError(f"{name} must be at least {low}, got {value}", field=name)


def _token_id(name: str, token_id: int, vocab_size: int) -> None:
    if not 0 <= token_id < vocab_size:
        raise InvalidRequestError(f"{name}: token id {token_id} is outside the vocabulary of {vocab_size}", field=name)
