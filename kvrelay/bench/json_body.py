"""Bodies of OpenAI's API as JSON, in pieces that take well under a millisecond each to encode.

Invariant: the pieces, joined, are the same JSON that `json.dumps` would give of the whole.
"""

import json
from collections.abc import Iterator, Mapping

from kvrelay.bench.base import ChatPrompt, Prompt

OWN_FIELDS = {
    *("model", "prompt", "messages", "max_tokens", "stream", "stream_options"),
    *("temperature", "top_k", "top_p", "ignore_eos"),
}
"""Fields of a body that the benchmark fills in itself; the last four have flags."""

_PIECE_TOKENS = 2048
_PIECE_CHARS = 1 << 15


def completion_body(fields: Mapping[str, object], prompt: Prompt) -> Iterator[bytes]:
    """Yields the body of a completion. `fields` are all that it has beside the prompt, at least one."""
    yield _open(fields) + b',"prompt":'
    if isinstance(prompt, str):
        yield from _string(prompt)
    else:
        yield b"["
        for begin in range(0, len(prompt), _PIECE_TOKENS):
            token_ids = ",".join(map(str, prompt[begin : begin + _PIECE_TOKENS]))
            yield (b"," if begin else b"") + token_ids.encode()
        yield b"]"
    yield b"}"


def chat_body(fields: Mapping[str, object], messages: ChatPrompt) -> Iterator[bytes]:
    """Yields the body of a chat. `fields` are all that it has beside the messages, at least one."""
    yield _open(fields) + b',"messages":['
    for index, (role, content) in enumerate(messages):
        yield (b"," if index else b"") + b'{"role":' + json.dumps(role).encode() + b',"content":'
        yield from _string(content)
        yield b"}"
    yield b"]}"


def _open(fields: Mapping[str, object]) -> bytes:
    """Returns an object without its closing brace."""
    return json.dumps(fields, separators=(",", ":")).encode().removesuffix(b"}")


def _string(text: str) -> Iterator[bytes]:
    yield b'"'
    for begin in range(0, len(text), _PIECE_CHARS):
        yield json.dumps(text[begin : begin + _PIECE_CHARS])[1:-1].encode()
    yield b'"'
