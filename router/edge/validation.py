"""The one path from a client's request to a `RoutedRequest`, for HTTP and gRPC alike.

Invariant: a RoutedRequest can be served: its token ids are in the vocabulary, prompt and output fit the model's length,
sampling is checked, the seed is drawn. Everything else is an InvalidRequestError that names the field as the client
does.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvrelay.core.errors import InvalidRequestError, UnknownModelError
from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.core.generation.token_ids import check_token_ids
from kvrelay.core.model.limits import checked_sampling, room_for_output, sampling_of_prompt, too_long
from kvrelay.text.chat_message import ChatMessage
from kvrelay.text.tokenizer import Tokenizer
from router.request import RoutedRequest, ServedModel

DEFAULT_COMPLETION_TOKENS = 16
MIN_PRIORITY, MAX_PRIORITY = -(2**31), 2**31 - 1
MAX_CACHE_SALT_CHARS = 1024
MAX_MESSAGES = 8192
MAX_CHAT_TEMPLATE_KWARGS_CHARS = 16 * 1024  # as JSON
# More characters per token than any vocabulary has on average: longer text is refused without tokenising it.
MAX_CHARS_PER_TOKEN = 128


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A text. `field` is the client's name for it, here as for the other prompts. `name`: which one of a list it is, as
    errors say it."""

    text: str
    add_special_tokens: bool = True
    field: str = "prompt"
    name: str | None = None


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    token_ids: Sequence[int]
    field: str = "prompt"
    name: str | None = None


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation. `template_kwargs` is what a JSON object had: variables for the model's chat template."""

    messages: Sequence[ChatMessage]
    add_generation_prompt: bool = True
    template_kwargs: dict[str, Any] | None = None
    field: str = "messages"
    name: None = None  # there is no list of conversations


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A request as the client wrote it: its types are checked, its values are not.

    `sampling.max_tokens` is ignored. `max_tokens` None means the default, which is all that is left of the model's
    length for chat and 16 otherwise; `max_tokens_field` is the client's name for this field. `model` None means the
    model that is served."""

    prompt: Prompt
    sampling: SamplingParams
    max_tokens: int | None = None
    max_tokens_field: str = "max_tokens"
    model: str | None = None
    priority: int = 0
    cache_salt: str | None = None


class RequestValidator:
    """The checks of requests against the model that is served. `default_timeout`: seconds that a request may take if
    the client does not set a shorter time."""

    def __init__(self, tokenizer: Tokenizer, model_name: str, *, default_timeout: float) -> None:
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._default_timeout = default_timeout

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self._model_name:
            raise UnknownModelError(
                f"the model {name[:100]!r} does not exist here; this server serves {self._model_name!r}", field="model"
            )

    def sampling(self, client: ClientRequest, model: ServedModel) -> SamplingParams:
        """Returns the checked sampling of a request, for `routed` of all that have the same one, as long as the same
        model is served: with many biases, to check it takes long. Raises what `routed` raises."""
        return checked_sampling(client.sampling, vocab_size=model.vocab_size, max_num_seqs=model.max_num_seqs)

    async def routed(
        self, client: ClientRequest, request_id: str, sampling: SamplingParams, model: ServedModel
    ) -> RoutedRequest:
        """Returns the checked request, with its `sampling` as the method of that name has returned it. Raises
        InvalidRequestError or UnknownModelError."""
        self.check_model(client.model)
        token_ids = await self.token_ids(client.prompt, model)
        if not token_ids:
            prompt = client.prompt
            message = f"{prompt.name or prompt.field} must not be empty: it has no tokens"
            raise InvalidRequestError(message, field=prompt.field)
        max_tokens = _max_tokens(client, len(token_ids), model.max_model_len)
        if not MIN_PRIORITY <= client.priority <= MAX_PRIORITY:
            raise InvalidRequestError(f"priority must fit 32 bits, got {client.priority}", field="priority")
        return RoutedRequest(
            request_id=request_id,
            prompt_token_ids=tuple(token_ids),
            sampling=sampling_of_prompt(sampling, max_tokens=max_tokens),
            kv_namespace=model.kv_namespace,
            priority=client.priority,
            cache_salt=_cache_salt(client.cache_salt),
            timeout=self._default_timeout,
        )

    async def token_ids(self, prompt: Prompt, model: ServedModel) -> Sequence[int]:
        """Returns the prompt's tokens, of which there may be none, all in the vocabulary. Raises InvalidRequestError
        otherwise."""
        field, name = prompt.field, prompt.name or prompt.field
        if isinstance(prompt, TokenPrompt):
            _room_after(prompt, len(prompt.token_ids), model.max_model_len)  # before the values are checked
            token_ids = prompt.token_ids[:]  # a list is read faster than protobuf's container
        elif isinstance(prompt, TextPrompt):
            _check_chars(prompt.text, prompt, model)
            token_ids = await self._tokenizer.encode(prompt.text, add_special_tokens=prompt.add_special_tokens)
        else:
            if not prompt.messages:
                raise InvalidRequestError(f"{field} must not be empty", field=field)
            _check_template_kwargs(prompt.template_kwargs)
            text = await self._tokenizer.render_chat(
                prompt.messages,
                add_generation_prompt=prompt.add_generation_prompt,
                variables=prompt.template_kwargs,
            )
            _check_chars(text, prompt, model)
            token_ids = await self._tokenizer.encode(text, add_special_tokens=False)
        # A tokenizer may know more tokens than its model. If it does not, its tokens, of which there may be millions,
        # need no check.
        if isinstance(prompt, TokenPrompt) or self._tokenizer.largest_token_id >= model.vocab_size:
            check_token_ids(token_ids, model.vocab_size, field=field, name=name)
        return token_ids


def _max_tokens(client: ClientRequest, num_prompt_tokens: int, max_model_len: int) -> int:
    """Returns the `max_tokens` that the client wants or gets by default. Raises InvalidRequestError if the model's
    length does not allow it."""
    wanted, field = client.max_tokens, client.max_tokens_field
    room = _room_after(client.prompt, num_prompt_tokens, max_model_len)
    if wanted is None:
        return room if isinstance(client.prompt, ChatPrompt) else min(DEFAULT_COMPLETION_TOKENS, room)
    if wanted < 1:
        raise InvalidRequestError(f"{field} must be at least 1, got {wanted}", field=field)
    if wanted > room:
        name = client.prompt.name
        prompt = f"{num_prompt_tokens} tokens of {name}" if name else f"{num_prompt_tokens} prompt tokens"
        reason = f"{prompt} and {field} of {wanted} are more: {field} may be at most {room}"
        raise too_long(max_model_len, reason, field=field)
    return wanted


def _room_after(prompt: Prompt, num_tokens: int, max_model_len: int) -> int:
    """Returns how many tokens a prompt leaves for the output, at least one. Raises ContextLengthError."""
    return room_for_output(num_tokens, max_model_len, field=prompt.field, prompt=prompt.name or "the prompt")


def _check_chars(text: str, prompt: Prompt, model: ServedModel) -> None:
    if len(text) > MAX_CHARS_PER_TOKEN * model.max_model_len:
        reason = f"{prompt.name or prompt.field} has {len(text)} characters, which are far more"
        raise too_long(model.max_model_len, reason, field=prompt.field)


def _check_template_kwargs(kwargs: dict[str, Any] | None) -> None:
    num_chars = 0
    for piece in json.JSONEncoder().iterencode(kwargs):  # only up to the limit: a body may have megabytes of them
        num_chars += len(piece)
        if num_chars > MAX_CHAT_TEMPLATE_KWARGS_CHARS:
            raise InvalidRequestError(
                f"chat_template_kwargs has more than {MAX_CHAT_TEMPLATE_KWARGS_CHARS} characters as JSON",
                field="chat_template_kwargs",
            )


def _cache_salt(salt: str | None) -> bytes:
    if salt is None:
        return b""
    if not 0 < len(salt) <= MAX_CACHE_SALT_CHARS:
        raise InvalidRequestError(f"cache_salt must have 1 to {MAX_CACHE_SALT_CHARS} characters", field="cache_salt")
    return salt.encode()
