"""Request bodies of the OpenAI API with vLLM's extra fields. Types are checked strictly here, values in `validation`.

Invariant: a field that is known but not supported is refused by name; an unknown field is ignored, and logged at debug
level.
"""

import codecs
import gc
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvrelay.core.errors import InvalidRequestError
from kvrelay.core.generation.sampling_params import MAX_LOGPROBS, SamplingParams
from kvrelay.core.model.limits import room_for_output
from kvrelay.text.chat_message import Role, refuse_unsupported, text_of
from router.edge.unsupported_fields import REMEDIES, UNSUPPORTED_FIELDS
from router.edge.validation import MAX_MESSAGES, ChatPrompt, Prompt, TextPrompt, TokenPrompt

_logger = logging.getLogger(__name__)

MAX_PROMPTS = 128
_MAX_ID_DIGITS = 10


@contextmanager
def _uncollected() -> Iterator[None]:
    """Keeps the garbage collector from running. A body may become millions of objects, none of which is garbage before
    it is whole: to look for it again and again would keep the event loop waiting for four times as long."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class StreamOptions(BaseModel):
    """What a client wants of a stream. `continuous_usage_stats` is vLLM's."""

    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Body(BaseModel):
    """A body of which all fields are checked strictly. None always means "not given"."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    # Fields that are supported for these values only.
    refused: ClassVar[Mapping[str, tuple[object, ...]]] = {}

    # OpenAI's clients must give one, and some that do not know it leave it empty, as vLLM allows.
    model: Annotated[str | None, AfterValidator(lambda name: name or None)] = None

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Parses a body, with or without a byte order mark, which .NET's writers put before UTF-8. Raises
        InvalidRequestError with one readable sentence."""
        with _uncollected():
            try:
                body = cls.model_validate_json(data.removeprefix(codecs.BOM_UTF8))
            except ValidationError as error:
                raise _readable(error) from None
            body.refuse_unsupported()
            (body.model_extra or {}).clear()  # nobody reads what was ignored, which may be most of the body
        return body

    def refuse_unsupported(self) -> None:
        """Raises InvalidRequestError for fields, or combinations of them, that are known but not supported."""
        for name, value in (self.model_extra or {}).items():
            if name not in self.refused:
                _logger.debug("ignored unknown field %s", name)
            elif value is not None and value not in self.refused[name]:
                remedy = f": {REMEDIES[name]}" if name in REMEDIES else ""
                raise InvalidRequestError(f"{name} is not supported here{remedy}", field=name)


class GenerationBody(Body):
    """The fields that completions and chat have in common."""

    # Unless a subclass has them: nobody shall believe in a field of chat in completions, or the other way round.
    refused = UNSUPPORTED_FIELDS

    max_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None  # its values are checked by `_biases`, up to the first wrong one
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    seed: int | None = None
    # vLLM's extra fields
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    cache_salt: str | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage is True

    @property
    def continuous_usage(self) -> bool:
        """Returns whether all events have the usage so far: as in vLLM, only if the last one has the whole."""
        options = self.stream_options
        return options is not None and options.include_usage is True and options.continuous_usage_stats is True

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options is only allowed when stream is true", field="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequestError("prompt_logprobs is not available when stream is true", field="prompt_logprobs")

    def sampling(self, *, logprobs: int | None) -> SamplingParams:
        """Returns the sampling fields that were given, and the API's defaults for the others. `max_tokens` is not among
        them: its default depends on the prompt."""
        given: dict[str, Any] = {
            name: value for name in _PLAIN_SAMPLING_FIELDS if (value := getattr(self, name)) is not None
        }
        if self.logit_bias is not None:
            given["logit_bias"] = _biases(self.logit_bias)
        return SamplingParams(**given, logprobs=logprobs)


_PLAIN_SAMPLING_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "stop",
    "seed",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "prompt_logprobs",
)


class CompletionBody(GenerationBody):
    prompt: Any = None
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidRequestError("best_of is only supported when it equals n", field="best_of")
        if self.echo and self.logprobs is not None and self.prompt_logprobs is not None:
            raise InvalidRequestError(
                "logprobs with echo are also those of the prompt: leave out prompt_logprobs", field="prompt_logprobs"
            )
        if self.only_echoes and (self.min_tokens or 0) > 0:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens (0)", field="min_tokens"
            )

    @property
    def only_echoes(self) -> bool:
        """Returns whether the client wants nothing but its prompt, as for the log-probabilities of a given text."""
        return self.echo is True and self.max_tokens == 0

    def prompts(self, max_model_len: int) -> list[TextPrompt | TokenPrompt]:
        """Returns one entry per prompt. Raises InvalidRequestError naming `prompt`. Lengths are checked before values,
        of which there may be very many."""
        prompt = self.prompt
        add_special_tokens = self.add_special_tokens is not False
        if prompt is None:
            raise InvalidRequestError("prompt is required", field="prompt")
        if isinstance(prompt, str):
            return [TextPrompt(prompt, add_special_tokens)]
        if isinstance(prompt, list):
            if not prompt:
                raise InvalidRequestError("prompt must not be empty", field="prompt")
            if type(prompt[0]) is int:
                room_for_output(len(prompt), max_model_len, field="prompt")
                if _are_token_ids(prompt):
                    return [TokenPrompt(prompt)]
            if len(prompt) > MAX_PROMPTS:
                raise InvalidRequestError(
                    f"prompt has {len(prompt)} entries, at most {MAX_PROMPTS} are allowed", field="prompt"
                )
            named = {f"prompt[{number}]": entry for number, entry in enumerate(prompt)}
            if all(isinstance(entry, str) for entry in prompt):
                return [TextPrompt(text, add_special_tokens, name=name) for name, text in named.items()]
            if all(isinstance(entry, list) for entry in prompt):
                for name, token_ids in named.items():
                    room_for_output(len(token_ids), max_model_len, field="prompt", prompt=name)
                if all(map(_are_token_ids, prompt)):
                    return [TokenPrompt(token_ids, name=name) for name, token_ids in named.items()]
        raise InvalidRequestError(
            "prompt must be a string, a list of strings, a list of token ids or a list of lists of token ids",
            field="prompt",
        )


class Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    role: Role
    content: Any = None

    @model_validator(mode="after")
    def _is_text(self) -> Self:
        refuse_unsupported(self.model_extra or {})  # first: what has such a field has null as its content
        text_of(self.content)
        return self

    @property
    def text(self) -> str:
        return text_of(self.content)


Messages = Annotated[list[Message], Field(fail_fast=True, max_length=MAX_MESSAGES)]


class ChatBody(GenerationBody):
    messages: Messages = Field(default_factory=list)  # so that what was given instead can be refused by name
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if "messages" not in self.model_fields_set:
            raise InvalidRequestError("messages is required", field="messages")
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs to be true", field="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequestError(
                "max_tokens and max_completion_tokens differ: give one of them", field="max_tokens"
            )

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def chat_prompt(self) -> ChatPrompt:
        return _chat_prompt(self.messages, self.add_generation_prompt, self.chat_template_kwargs)


class TokenizeBody(Body):
    """A text, or the messages of a chat, whose tokens are wanted, as vLLM's `/tokenize` takes them."""

    # Nothing that would change a chat's prompt may be ignored.
    refused = {
        name: UNSUPPORTED_FIELDS[name]
        for name in (
            *("tools", "documents", "mm_processor_kwargs", "chat_template", "continue_final_message"),
            *("reasoning_effort", "reasoning"),
        )
    }

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    def wanted(self) -> Prompt:
        """Returns what is to be tokenised. Raises InvalidRequestError naming a field that is missing, or does not go
        with the others."""
        if self.prompt is not None:
            for name in ("messages", "add_generation_prompt", "chat_template_kwargs"):
                if getattr(self, name) is not None:
                    raise InvalidRequestError(f"{name} cannot be combined with prompt", field=name)
            return TextPrompt(self.prompt, self.add_special_tokens is not False)
        if self.messages is None:
            raise InvalidRequestError("prompt or messages is required", field="prompt")
        if self.add_special_tokens:
            raise InvalidRequestError(
                "add_special_tokens cannot be combined with messages, whose template has them",
                field="add_special_tokens",
            )
        return _chat_prompt(self.messages, self.add_generation_prompt, self.chat_template_kwargs)


class DetokenizeBody(Body):
    """Tokens whose text is wanted, as vLLM's `/detokenize` takes them."""

    tokens: Annotated[list[int], Field(fail_fast=True)]


def _chat_prompt(
    messages: Sequence[Message], add_generation_prompt: bool | None, template_kwargs: dict[str, Any] | None
) -> ChatPrompt:
    return ChatPrompt(
        [{"role": message.role, "content": message.text} for message in messages],
        add_generation_prompt=add_generation_prompt is not False,
        template_kwargs=template_kwargs,
    )


def _are_token_ids(values: list[Any]) -> bool:
    return set(map(type, values)) <= {int}  # not isinstance, for which true and false are integers


def _biases(logit_bias: Mapping[str, Any]) -> Iterator[tuple[int, float]]:
    for key, bias in logit_bias.items():
        if type(bias) not in (int, float):  # not isinstance, for which true and false are numbers
            raise InvalidRequestError(f"logit_bias: the bias of {key[:100]!r} is not a number", field="logit_bias")
        yield _token_key(key), bias


def _token_key(key: str) -> int:
    if len(key) <= _MAX_ID_DIGITS and key.isascii() and key.isdigit():  # int also takes "5_0" and " 50"
        return int(key)
    raise InvalidRequestError(f"logit_bias: {key[:100]!r} is not a token id", field="logit_bias")


def _readable(error: ValidationError) -> InvalidRequestError:
    """Returns one sentence about the first error. For a union, the messages of all of its members are joined."""
    first, *others = error.errors(include_url=False, include_context=False, include_input=False)
    if first["type"] == "json_invalid":
        return InvalidRequestError(f"the body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    if not first["loc"]:
        return InvalidRequestError("the body must be a JSON object")
    field = str(first["loc"][0])
    messages = [first["msg"], *(other["msg"] for other in others if other["loc"][:1] == first["loc"][:1])]
    readable = " or ".join(dict.fromkeys(_lowered(message) for message in messages))
    return InvalidRequestError(f"{_path(first['loc'])}: {readable}", field=field)


def _lowered(message: str) -> str:
    message = message.removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


def _path(location: tuple[int | str, ...]) -> str:
    """Returns a field's path such as `messages[0].role`, without what pydantic adds for members of a union
    (`list[str]`)."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int"):
            path += f".{part}" if path else part
    return path
