"""Responses of the OpenAI API: whole ones, and streamed ones as server-sent events; and vLLM's of tokens.

Invariant: events with text are built from strings, without a dict, and what does not change is encoded once per
request.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvrelay.core.generation.outputs import TokenLogprobs
from kvrelay.core.turns import ITEMS_AT_A_TIME, in_turns
from kvrelay.text.choice import TextChunk
from kvrelay.text.tokenizer import Tokenizer
from router.request import KVOrigins, RequestTrace

# JSON has no infinity. OpenAI writes this for a token that cannot occur.
MIN_LOGPROB = -9999.0

DONE = b"data: [DONE]\n\n"

Json = dict[str, Any]
# Encoded JSON that is yet to be joined. There may be tens of megabytes of it, so it is copied only once.
Pieces = list[bytes | bytearray]

_encode = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":")).encode
# Ends of lines to Python's `str.splitlines`, and so to the `iter_lines` of its HTTP clients, which would cut an event
# in two. JSON itself escapes the other ones.
_LINE_ENDS = ("\u0085", "\u2028", "\u2029")


def to_json(value: object) -> str:
    """Encodes a value as JSON that may stand in a server-sent event."""
    text = _encode(value)
    if not text.isascii():
        for end in _LINE_ENDS:  # a regular expression would take thirty times as long
            text = text.replace(end, f"\\u{ord(end):04x}")
    return text


def event(body: Json) -> bytes:
    """Encodes one server-sent event."""
    return f"data: {to_json(body)}\n\n".encode()


@dataclass(slots=True)
class Usage:
    """Tokens and traces of a whole HTTP request, over all its prompts. `traces` are by prompt."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    traces: dict[int, RequestTrace] = field(default_factory=dict)

    def so_far(self) -> Json:
        """Returns what is known before the end."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }

    def as_json(self) -> Json:
        num_cached_tokens = sum(trace.num_cached_tokens for trace in self.traces.values())
        return self.so_far() | {"prompt_tokens_details": {"cached_tokens": num_cached_tokens}}

    def trace_as_json(self) -> Json | None:
        """Returns how the request was served; for several prompts, as a list under `requests`, in their order."""
        traces = [_members(trace) | {"kv": _members(trace.kv)} for _, trace in sorted(self.traces.items())]
        if len(traces) == 1:
            return traces[0]
        return {"requests": traces} if traces else None


@dataclass(slots=True)
class Echo:
    """A prompt that is repeated before the output. `logprobs` has the items of each list, by the list's name, if they
    are repeated, too: they are known before the first output."""

    text: str
    logprobs: dict[str, bytes] = field(default_factory=dict)


class Format(Protocol):
    """What differs between completions and chat: the JSON that carries the text and log-probabilities of a choice."""

    object_name: str
    chunk_object_name: str
    prompt_logprobs_in_choices: bool
    """Whether each choice has the log-probabilities of its prompt, or the answer once: as vLLM does it."""

    def opening(self, echo: Echo | None) -> Pieces | None:
        """Returns the encoded members of the event with which a streamed choice begins, its text and log-probabilities,
        in pieces; None if there is no such event. `echo` is the prompt if it is repeated."""
        ...

    def delta(self, text_json: str) -> str:
        """Returns the encoded member that carries a piece of text, which is given as JSON."""
        ...

    def closing(self) -> Json:
        """Returns the member that the last event of a choice has in the place of text."""
        ...

    def whole(self, text: str) -> Json:
        """Returns the member that carries the text of a choice that is not streamed."""
        ...

    def logprobs(self, entries: Sequence[TokenLogprobs], text_offsets: Sequence[int]) -> dict[str, list[Any] | None]:
        """Returns lists by name, each with an item for every entry, or None if there is no such list."""
        ...


@dataclass(slots=True)
class WholeChoice:
    """One choice of a response that is not streamed. `logprobs` has the items of each list of its log-probabilities, by
    the list's name. They are encoded as they come: at the end, those of a long response would keep the event loop
    waiting for seconds. `echoed` has those of the prompt, which all its choices share, and which come first."""

    answer_format: Format
    text: list[str] = field(default_factory=list)
    echoed: Mapping[str, bytes] = field(default_factory=dict)
    logprobs: dict[str, bytearray] = field(default_factory=dict)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, chunk: TextChunk, stop_reason: str | int | None) -> int:
        """Appends a chunk. Returns about how many bytes that makes the response longer."""
        self.text.append(chunk.text)
        num_bytes = len(chunk.text)
        if chunk.logprobs:
            for name, items in self.answer_format.logprobs(chunk.logprobs, chunk.text_offsets).items():
                encoded = self.logprobs.setdefault(name, bytearray())
                if items is not None:
                    num_bytes -= len(encoded)
                    if encoded or name in self.echoed:
                        encoded += b","
                    encoded += to_json(items)[1:-1].encode()
                    num_bytes += len(encoded)
        if chunk.finish_reason is not None:
            self.finish_reason, self.stop_reason = chunk.finish_reason.value, stop_reason
        return num_bytes

    def begin_with(self, echo: Echo) -> None:
        self.echoed = echo.logprobs
        self.logprobs = {name: bytearray() for name in echo.logprobs}

    def encoded_logprobs(self) -> Pieces:
        """Returns the JSON of all of them, in pieces."""
        return _lists({name: [self.echoed.get(name, b""), items] for name, items in self.logprobs.items()})


class CompletionFormat:
    """The format of completions."""

    object_name = chunk_object_name = "text_completion"
    prompt_logprobs_in_choices = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def opening(self, echo: Echo | None) -> Pieces | None:
        if echo is None:
            return None
        logprobs = _lists({name: [items] for name, items in echo.logprobs.items()})
        return [b'"text":', to_json(echo.text).encode(), b',"logprobs":', *logprobs]

    def delta(self, text_json: str) -> str:
        return f'"text":{text_json}'

    def closing(self) -> Json:
        return {"text": ""}

    def whole(self, text: str) -> Json:
        return {"text": text}

    def logprobs(self, entries: Sequence[TokenLogprobs], text_offsets: Sequence[int]) -> dict[str, list[Any] | None]:
        text = self._tokenizer.token_text
        return {
            "tokens": [text(entry.token_id) for entry in entries],
            "token_logprobs": [finite(entry.logprob) for entry in entries],
            "top_logprobs": [self._by_text(entry) for entry in entries],
            "text_offset": list(text_offsets),
        }

    def _by_text(self, entry: TokenLogprobs) -> Json:
        """Returns the log-probabilities of the likeliest tokens, best first, and of the token itself. Of tokens with
        the same text, such as the bytes of a character, the likelier one counts."""
        found: Json = {}
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            found.setdefault(self._tokenizer.token_text(token_id), finite(logprob))
        return found


class ChatFormat:
    """The format of chat completions."""

    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"
    prompt_logprobs_in_choices = False

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def opening(self, echo: Echo | None) -> Pieces | None:
        return [b'"delta":{"role":"assistant","content":""},"logprobs":null']

    def delta(self, text_json: str) -> str:
        return f'"delta":{{"content":{text_json}}}'

    def closing(self) -> Json:
        return {"delta": {}}

    def whole(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def logprobs(self, entries: Sequence[TokenLogprobs], text_offsets: Sequence[int]) -> dict[str, list[Any] | None]:
        return {
            "content": [
                self._token(entry.token_id, entry.logprob)
                | {"top_logprobs": [self._token(token_id, logprob) for token_id, logprob in entry.top]}
                for entry in entries
            ],
            "refusal": None,
        }

    def _token(self, token_id: int, logprob: float) -> Json:
        return {
            "token": self._tokenizer.token_text(token_id),
            "logprob": finite(logprob),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }


@dataclass(frozen=True, slots=True)
class Envelope:
    """What all events of one response repeat. `created` is Unix time in seconds."""

    response_id: str
    model: str
    created: int

    def head(self, object_name: str) -> Json:
        return {"id": self.response_id, "object": object_name, "created": self.created, "model": self.model}


class StreamFormatter:
    """What turns the chunks of all choices of one request into server-sent events."""

    def __init__(self, answer_format: Format, envelope: Envelope, *, include_usage: bool) -> None:
        self._format = answer_format
        self._head = envelope.head(answer_format.chunk_object_name)
        if include_usage:
            self._head["usage"] = None
        self._prefix = self._choice_prefix()
        self._opened: set[int] = set()

    def show(self, usage: Usage) -> None:
        """Gives the following events the usage so far."""
        self._head["usage"] = usage.so_far()
        self._prefix = self._choice_prefix()

    def chunk(self, index: int, echo: Echo | None, chunk: TextChunk, stop_reason: str | int | None) -> bytes:
        """Returns the events of a chunk; no bytes if the chunk has nothing to show. `echo` as in `Format.opening`."""
        logprobs = "null"
        if chunk.logprobs:
            logprobs = to_json(self._format.logprobs(chunk.logprobs, chunk.text_offsets))
        message = ""
        if chunk.text or chunk.logprobs:
            delta = self._format.delta(to_json(chunk.text))
            message = f'{self._prefix}{index},{delta},"logprobs":{logprobs},"finish_reason":null}}]}}\n\n'
        if index in self._opened and chunk.finish_reason is None:
            return message.encode()
        return b"".join((*self._opening(index, echo), message.encode(), self._closing(index, chunk, stop_reason)))

    def usage(self, usage: Usage) -> bytes:
        body = self._head | {"choices": [], "usage": usage.as_json()}
        trace = usage.trace_as_json()
        return event(body if trace is None else body | {"kvrelay": trace})

    def _choice_prefix(self) -> str:
        return f'data: {to_json(self._head)[:-1]},"choices":[{{"index":'

    def _opening(self, index: int, echo: Echo | None) -> Pieces:
        if index in self._opened:
            return []
        self._opened.add(index)
        members = self._format.opening(echo)
        if members is None:
            return []
        return [f"{self._prefix}{index},".encode(), *members, b',"finish_reason":null}]}\n\n']

    def _closing(self, index: int, chunk: TextChunk, stop_reason: str | int | None) -> bytes:
        if chunk.finish_reason is None:
            return b""
        choice = {
            "index": index,
            **self._format.closing(),
            "logprobs": None,
            "finish_reason": chunk.finish_reason.value,
            "stop_reason": stop_reason,
        }
        return event(self._head | {"choices": [choice]})


async def whole_response(
    answer_format: Format,
    envelope: Envelope,
    choices: Sequence[WholeChoice],
    n: int,
    usage: Usage,
    prompt_logprobs: Mapping[int, bytes],
) -> bytes:
    """Returns the body of a response that is not streamed. `choices` are in order, `n` for each prompt;
    `prompt_logprobs` are encoded, by prompt, if they were asked for."""
    pieces: Pieces = [to_json(envelope.head(answer_format.object_name))[:-1].encode(), b',"choices":[']
    for index, choice in enumerate(choices):
        if index > 0:
            pieces.append(b",")
            await asyncio.sleep(0)  # a hundred of them may be long
        body: Json = {
            "index": index,
            **answer_format.whole("".join(choice.text)),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        shown = prompt_logprobs.get(index // n) if answer_format.prompt_logprobs_in_choices else None
        pieces += _extended(body, logprobs=choice.encoded_logprobs(), prompt_logprobs=shown)
    trace = usage.trace_as_json()
    rest = {"usage": usage.as_json()} | ({} if trace is None else {"kvrelay": trace})
    shown = None if answer_format.prompt_logprobs_in_choices else prompt_logprobs.get(0)
    first, *others = _extended(rest, prompt_logprobs=shown)
    return b"".join((*pieces, b"],", first[1:], *others))


async def tokens_response(
    token_ids: Sequence[int], token_strs: Sequence[str | None] | None, *, max_model_len: int
) -> bytes:
    """Returns the body of an answer with the tokens of a prompt, in vLLM's form. `token_strs`: each as the vocabulary
    writes it, unless left out. The event loop turns after some of them, because there may be millions."""
    body: Json = {"count": len(token_ids), "max_model_len": max_model_len}
    tokens = await _encoded_list(token_ids)
    strs = None if token_strs is None else await _encoded_list(token_strs)
    return b"".join(_extended(body, tokens=tokens, token_strs=strs))


async def _encoded_list(items: Sequence[object]) -> Pieces:
    """Returns the JSON of a list in pieces. Its items are so small that many of them together are one of `in_turns`."""
    slices = (items[start : start + ITEMS_AT_A_TIME] for start in range(0, len(items), ITEMS_AT_A_TIME))
    return [b"[", b",".join(await in_turns(lambda some: to_json(some)[1:-1].encode(), slices)), b"]"]


def _extended(body: Json, **encoded: bytes | Pieces | None) -> Pieces:
    """Returns the JSON of `body` with more members, unless they are None, in pieces."""
    pieces: Pieces = [to_json(body)[:-1].encode()]
    for name, value in encoded.items():
        if value is not None:
            pieces += [f',"{name}":'.encode(), *([value] if isinstance(value, bytes) else value)]
    return [*pieces, b"}"]


def _lists(lists: Mapping[str, Pieces]) -> Pieces:
    """Returns the JSON of lists in pieces. The encoded items of each are given by its name, in pieces, too; a list
    without items is null."""
    pieces: Pieces = []
    for name, items in lists.items():
        pieces += [b"," if pieces else b"{", f'"{name}":'.encode()]
        pieces += [b"[", *items, b"]"] if any(items) else [b"null"]
    return [*pieces, b"}"] if pieces else [b"null"]


def _members(value: RequestTrace | KVOrigins) -> Json:
    """Returns the fields by name. dataclasses' `asdict` takes ten times as long, because it copies what they hold."""
    return {name: getattr(value, name) for name in value.__slots__}


def finite(logprob: float) -> float:
    """Returns the log-probability as JSON can have it, which has neither infinities nor NaN."""
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB
