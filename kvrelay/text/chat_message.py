"""What a message of a chat may be, whichever way it comes: over HTTP, over gRPC, or to `LLM.chat`.

Invariant: of a message that passes, a chat template gets a role that is known and a text, and nothing else.
"""

from collections.abc import Mapping
from typing import Literal, get_args

from kvrelay.core.errors import InvalidRequestError

ChatMessage = Mapping[str, str]
"""The role and the text of a message, under the keys `role` and `content`."""
Role = Literal["system", "developer", "user", "assistant"]
"""Who may speak in a chat."""

_UNSUPPORTED = ("tool_calls", "function_call", "audio")


def check_role(role: str, number: int) -> None:
    """Raises InvalidRequestError, which names `messages`, if message `number` has a role that is not known."""
    if role not in get_args(Role):
        raise InvalidRequestError(
            f"messages[{number}].role must be one of {', '.join(get_args(Role))}, got {role[:100]!r}", field="messages"
        )


def refuse_unsupported(message: Mapping[str, object]) -> None:
    """Raises ValueError for what other servers understand in a message and a template cannot be given here. What nobody
    has heard of is ignored, and so is what says nothing, such as an empty list."""
    for name in _UNSUPPORTED:
        if message.get(name):
            raise ValueError(f"{name} is not supported here")


def text_of(content: object) -> str:
    """Returns the text of a message's content, with a line end between its parts. Raises ValueError if it is neither a
    string nor a list of text parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError("content must be a string or a list of text parts")
    texts: list[str] = []
    for number, part in enumerate(content):
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise ValueError(f"content[{number}] must be a part of type text")
        texts.append(part["text"])
    return "\n".join(texts)
