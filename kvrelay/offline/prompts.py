"""What callers of `LLM` give as prompts and conversations, brought into one form.

Invariant: what comes out has the right types; whether the model can take it is checked later.
"""

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, TypeGuard

from kvrelay.core.errors import InvalidRequestError
from kvrelay.text.chat_message import ChatMessage, check_role, refuse_unsupported, text_of

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text; token ids; or a mapping that has one of them under vLLM's name, `prompt` or `prompt_token_ids`."""
Message = Mapping[str, Any]
"""`role` and `content`, a string or a list of text parts, as over HTTP."""

_PROMPT_FIELDS = {"prompt", "prompt_token_ids"}
_MESSAGES = "messages must be a list of messages, each with a role and a content, or a list of such lists"


def prompts_of(given: Prompt | Sequence[Prompt]) -> list[str | list[int]]:
    """Returns a list of prompts, whether one or several were given. Raises InvalidRequestError."""
    if isinstance(given, str | Mapping):
        return [_prompt(given, 0)]
    items = _unpacked(given)
    if not _is_list(items):
        raise InvalidRequestError(f"prompts must be a prompt or a list of them, got {given!r}", field="prompts")
    if len(items) and all(isinstance(item, Integral) for item in items):
        return [_prompt(items, 0)]
    return [_prompt(item, number) for number, item in enumerate(items)]


def _prompt(given: object, number: int) -> str | list[int]:
    """Returns a text or token ids. Raises InvalidRequestError."""
    if isinstance(given, Mapping):
        if len(given) != 1 or not given.keys() <= _PROMPT_FIELDS:
            names = ", ".join(map(str, given)) or "nothing"
            raise InvalidRequestError(
                f"prompt {number} must have either prompt or prompt_token_ids, and has {names}", field="prompts"
            )
        [(name, given)] = given.items()
        if isinstance(given, str) != (name == "prompt"):
            raise InvalidRequestError(f"prompt {number}: {name} has the wrong type", field="prompts")
    if isinstance(given, str):
        return given
    given = _unpacked(given)
    if _is_list(given) and all(isinstance(item, Integral) and not isinstance(item, bool) for item in given):
        return [int(item) for item in given]
    raise InvalidRequestError(f"prompt {number} is neither a text nor a list of token ids", field="prompts")


def _unpacked(value: object) -> object:
    """Returns an array of numpy or a tensor of torch as lists of Python's own values, anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Tells whether a value is a list, a tuple or something like them. The items of bytes are integers, too."""
    return hasattr(value, "__len__") and hasattr(value, "__getitem__") and not isinstance(value, bytes | bytearray)


def conversations_of(given: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """Returns a list of conversations, whether one or several were given. Raises InvalidRequestError."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise InvalidRequestError(f"{_MESSAGES}, got {given!r}", field="messages")
    messages = [item for item in given if isinstance(item, Mapping)]
    conversations = [item for item in given if not isinstance(item, Mapping)]
    if messages and conversations:
        raise InvalidRequestError("messages must be one conversation or several, not both at once", field="messages")
    return [messages] if messages else conversations


def chat_messages(given: Sequence[Message]) -> list[ChatMessage]:
    """Returns roles and texts. Raises InvalidRequestError for what is refused over HTTP as well."""
    messages: list[ChatMessage] = []
    is_list = isinstance(given, Sequence) and not isinstance(given, str)
    if not is_list or not given or not all(isinstance(message, Mapping) for message in given):
        raise InvalidRequestError(f"{_MESSAGES}, got {given!r}", field="messages")
    for number, message in enumerate(given):
        role = message.get("role")
        if not isinstance(role, str):
            raise InvalidRequestError(f"messages[{number}] has no role", field="messages")
        check_role(role, number)
        try:
            refuse_unsupported(message)
            messages.append({"role": role, "content": text_of(message.get("content"))})
        except ValueError as error:
            raise InvalidRequestError(f"messages[{number}]: {error}", field="messages") from error
    return messages
