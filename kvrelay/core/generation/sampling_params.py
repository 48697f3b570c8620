"""How tokens are chosen: one frozen value that the client API, the router and the engine share."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from numbers import Integral, Real

from kvrelay.core.errors import InvalidRequestError
from kvrelay.core.generation.token_ids import check_token_ids

MAX_N = 128
_GREEDY_BELOW = 1e-5  # temperatures
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LENGTH = 1024
MAX_TOKEN_ENTRIES = 65_536  # of stop_token_ids, and of logit_bias
MIN_SEED, MAX_SEED = -(2**63), 2**64 - 1

_INTEGERS = ("n", "max_tokens", "min_tokens", "top_k")
_OPTIONAL_INTEGERS = ("seed", "logprobs", "prompt_logprobs")
_NUMBERS = (
    *("temperature", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
_SWITCHES = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")
_ALL_NUMBERS = (*_INTEGERS, *_OPTIONAL_INTEGERS, *_NUMBERS)
_PLAIN = frozenset((int, float, bool, type(None)))


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request; `validate` names the first field that is wrong.

    Names and defaults follow the OpenAI API where it has the field and vLLM's extensions elsewhere. `top_k` 0 turns it
    off; a `temperature` below 0.00001 is greedy. `logprobs` k asks for the sampled token and the k most likely ones,
    from the unmodified logits. Randomness is a pure function of (seed, choice index, position); with `seed` None the
    router (or `LLM`) draws one.

    What clients may write in several ways has one form here. Numbers of other types, such as numpy's and `Fraction`,
    become Python's own. A `top_k` of -1 becomes 0, and a negative `seed` the unsigned number of the same 64 bits.
    `stop` may be one string, and `logit_bias` a mapping from token id to bias or such pairs. Both become tuples, and so
    does `stop_token_ids`; InvalidRequestError if that is not possible, or if there are too many entries, of which those
    past the limit are not looked at.
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
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        for name in _ALL_NUMBERS:
            value = getattr(self, name)
            if type(value) not in _PLAIN:
                object.__setattr__(self, name, _plain(value, as_float=name in _NUMBERS))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if isinstance(self.seed, int) and MIN_SEED <= self.seed < 0:
            object.__setattr__(self, "seed", self.seed % 2**64)
        pairs = self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else self.logit_bias
        biases = _tuple("logit_bias", pairs, MAX_TOKEN_ENTRIES, "a mapping from token id to bias")
        object.__setattr__(self, "logit_bias", biases)
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _tuple("stop", stop, MAX_STOP_STRINGS, "a string or several"))
        ids = _tuple("stop_token_ids", self.stop_token_ids, MAX_TOKEN_ENTRIES, "several token ids")
        object.__setattr__(self, "stop_token_ids", ids)

    @property
    def greedy(self) -> bool:
        """Tells whether the likeliest token is taken, of several the one of the lowest id. Temperatures that are all
        but 0 would draw among exact ties only, which are common with bfloat16: whoever writes them means 0."""
        return self.temperature < _GREEDY_BELOW

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """Returns `logit_bias` as pairs of token id and bias."""
        assert isinstance(self.logit_bias, tuple)
        return self.logit_bias

    def validate(self, *, vocab_size: int) -> None:
        """Raises InvalidRequestError naming the field."""
        self.validate_but_lengths(vocab_size=vocab_size)
        self.validate_lengths()

    def validate_lengths(self) -> None:
        """Raises InvalidRequestError if `max_tokens` or `min_tokens` is wrong: they may depend on the prompt, the other
        fields never do."""
        _at_least("max_tokens", self.max_tokens, 1)
        _at_least("min_tokens", self.min_tokens, 0)
        if self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})", field="min_tokens"
            )

    def validate_but_lengths(self, *, vocab_size: int) -> None:
        """Raises InvalidRequestError naming a field of the wrong type, or another one than the lengths that is wrong.
        With as many biases as there may be, this takes tens of milliseconds."""
        self._check_types()
        _in_range("n", self.n, 1, MAX_N)
        _in_range("temperature", self.temperature, 0.0, 100.0)
        _at_least("top_k", self.top_k, 0)
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequestError(f"top_p must be in (0, 1], got {self.top_p}", field="top_p")
        _in_range("min_p", self.min_p, 0.0, 1.0)
        if not 0.0 < self.repetition_penalty <= sys.float_info.max:
            raise InvalidRequestError(
                f"repetition_penalty must be above 0, got {self.repetition_penalty}", field="repetition_penalty"
            )
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        biased_ids = [token_id for token_id, _ in self.biases]
        check_token_ids(biased_ids, vocab_size, field="logit_bias")
        if len(set(biased_ids)) < len(biased_ids):
            raise InvalidRequestError("logit_bias has more than one bias for a token", field="logit_bias")
        for _, bias in self.biases:
            _in_range("logit_bias", bias, -100.0, 100.0)
        check_token_ids(self.stop_token_ids, vocab_size, field="stop_token_ids")
        for text in self.stop:
            if not 0 < len(text) <= MAX_STOP_STRING_LENGTH:
                raise InvalidRequestError(
                    f"stop strings must have 1 to {MAX_STOP_STRING_LENGTH} characters", field="stop"
                )
        if self.seed is not None:
            _in_range("seed", self.seed, MIN_SEED, MAX_SEED)
        if self.logprobs is not None:
            _in_range("logprobs", self.logprobs, 0, min(MAX_LOGPROBS, vocab_size))
        if self.prompt_logprobs is not None:
            _in_range("prompt_logprobs", self.prompt_logprobs, 0, min(MAX_LOGPROBS, vocab_size))

    def _check_types(self) -> None:
        for name in _INTEGERS:
            _check_type(name, getattr(self, name), Integral, "an integer")
        for name in _OPTIONAL_INTEGERS:
            if (value := getattr(self, name)) is not None:
                _check_type(name, value, Integral, "an integer or None")
        for name in _NUMBERS:
            _check_type(name, getattr(self, name), Real, "a number")
        for name in _SWITCHES:
            if not isinstance(value := getattr(self, name), bool):
                raise InvalidRequestError(f"{name} must be true or false, got {value!r}", field=name)
        for pair in self.biases:
            _check_pair("logit_bias", pair)
        _check_all("logit_bias", (token_id for token_id, _ in self.biases), Integral, "a mapping from token ids")
        _check_all("logit_bias", (bias for _, bias in self.biases), Real, "a mapping to numbers")
        _check_all("stop_token_ids", self.stop_token_ids, Integral, "token ids")
        for text in self.stop:
            _check_type("stop", text, str, "a string or several")


def _plain(value: object, *, as_float: bool) -> object:
    """Returns a number as an int or a float, anything else as it is: `validate` refuses that."""
    if as_float and isinstance(value, Real):
        try:
            return float(value)
        except OverflowError:
            return value
    return int(value) if isinstance(value, Integral) else value


def _tuple(name: str, values: Iterable[object], most: int, wanted: str) -> tuple[object, ...]:
    if type(values) is tuple and len(values) <= most:
        return values  # as `replace` gives what has been checked already
    try:
        entries = tuple(islice(values, most + 1))
    except TypeError:
        raise InvalidRequestError(f"{name} must be {wanted}, got {values!r}", field=name) from None
    if len(entries) > most:
        raise InvalidRequestError(f"{name} has more than the {most} entries that are allowed", field=name)
    return entries


def _check_pair(name: str, value: object) -> None:
    if not (isinstance(value, tuple | Sequence) and len(value) == 2):  # a tuple, as most are, is known at once
        raise InvalidRequestError(f"{name} must be a mapping or pairs of token id and bias, got {value!r}", field=name)


def _check_all(name: str, values: Iterable[object], wanted: type, words: str) -> None:
    """Checks one value of each type, because `_check_type` of 65,536 values takes tens of milliseconds."""
    for value in {type(value): value for value in values}.values():
        _check_type(name, value, wanted, words)


def _check_type(name: str, value: object, wanted: type, words: str) -> None:
    if not isinstance(value, wanted) or isinstance(value, bool):  # true and false are integers to Python
        raise InvalidRequestError(f"{name} must be {words}, got {value!r}", field=name)


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # which NaN and infinities fail
        raise InvalidRequestError(f"{name} must be between {low} and {high}, got {value}", field=name)


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise InvalidRequestError(f"{name} must be at least {low}, got {value}", field=name)
