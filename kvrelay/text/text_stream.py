"""Incremental decoding of one output sequence: all pieces together are what its tokens add to the text of the prompt.
That is `Tokenizer.decode` of them, with the space in front that some decoders drop at the beginning of a text.

With byte-level BPE that is the bytes of the tokens, read as UTF-8. Other decoders look at several tokens at a time, and
the library's stream knows when what they say of them is certain. There is one exception: `decode` voids a whole run of
byte tokens that holds broken bytes, but characters in front of these have been streamed.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from tokenizers.decoders import DecodeStream

from kvrelay.text.tokenizer import Tokenizer

# Tokens of context for a new decoding stream: some decoders treat the first token differently.
_RESUME_TOKENS = 8
# Among as many last tokens of a prompt, one that is text by itself is looked for.
_PROMPT_TOKENS = 32
# So many tokens without text are bytes that form no character, and no later one changes that.
_MOST_TOKENS_WITHOUT_TEXT = 64
# So many tokens are kept before those are forgotten that nothing depends on any more.
_MOST_TOKENS_KEPT = 64
# A byte of no character: with it, none of the byte-fallback tokens that follow forms one either.
_NO_CHARACTER = "<0xFF>"


class TextStream(Protocol):
    """The decoding of one sequence: `push` takes each token in order, then `flush` is called once. `num_chars`: of all
    pieces so far."""

    num_chars: int

    def push(self, token_id: int) -> str:
        """Returns the text that is now certain."""
        ...

    def start_of(self, token_id: int) -> int:
        """Returns where in the text of all pieces that of the next token begins, as far as is known."""
        ...

    def flush(self) -> str:
        """Returns the rest of the text when the sequence has ended. An incomplete character becomes U+FFFD."""
        ...


def text_stream(tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> TextStream:
    if tokenizer.decodes_bytes:
        return ByteStream(tokenizer, skip_special_tokens=skip_special_tokens)
    return LibraryStream(tokenizer, prompt_token_ids, skip_special_tokens=skip_special_tokens)


class ByteStream:
    """The stream of a tokenizer whose texts are the bytes of their tokens. Bytes of an incomplete character at the end
    of the prompt stay the prompt's; what completes them is U+FFFD, as it is alone."""

    __slots__ = ("_decoder", "_skipped", "_tokenizer", "num_chars")

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.num_chars = 0

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        text = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        self.num_chars += len(text)
        return text

    def start_of(self, token_id: int) -> int:
        """Returns where the character begins that the token completes or goes on with; if it does neither, the next
        character."""
        pending, _ = self._decoder.getstate()
        first = b"" if token_id in self._skipped else self._tokenizer.token_bytes(token_id)[:1]
        try:
            codecs.utf_8_decode(pending + first, "strict", False)
        except UnicodeDecodeError:
            return self.num_chars + len(pending.decode("utf-8", "replace"))
        return self.num_chars

    def flush(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self.num_chars += len(text)
        return text


class LibraryStream:
    """The stream of any tokenizer, by `tokenizers`' DecodeStream."""

    __slots__ = (
        "_has_resumed",
        "_num_context_chars",
        "_num_settled_chars",
        "_num_without_text",
        "_skip_special_tokens",
        "_stream",
        "_token_ids",
        "_tokenizer",
        "num_chars",
    )

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._token_ids, self._num_context_chars = self._context(prompt_token_ids)
        self._stream = DecodeStream(ids=self._token_ids, skip_special_tokens=skip_special_tokens)
        self._num_settled_chars = 0  # of the text, before that of `_token_ids` behind their context
        self._num_without_text = 0  # tokens that the stream has got since it last returned text; it decodes all of them
        self._has_resumed = False
        self.num_chars = 0

    def push(self, token_id: int) -> str:
        if not self._may_add_text(token_id):
            return ""
        self._token_ids.append(token_id)
        text = self._step(token_id)
        if (
            len(self._token_ids) > _MOST_TOKENS_KEPT
            and self._num_without_text == 0
            and not self._tokenizer.is_byte_token(token_id)
        ):
            text += self._settle()
        return text

    def _step(self, token_id: int) -> str:
        try:
            text = self._stream.step(self._tokenizer.backend, token_id)
        except Exception:  # when later bytes change how earlier ones decode, the library raises no narrower class
            return self._resume(self._token_ids[-_RESUME_TOKENS:], self._decode_all().rstrip("\ufffd"))
        if text is None:
            self._num_without_text += 1
            if self._num_without_text < _MOST_TOKENS_WITHOUT_TEXT or self._ends_within_character():
                return ""
            return self._resume(self._broken_context(), self._decode_all())
        self._num_without_text = 0
        if self._has_resumed:  # the stream does not know what of its context was returned
            self._has_resumed = False
            return self._advance_to(self._decode_all())
        self.num_chars += len(text)
        return text

    def start_of(self, token_id: int) -> int:
        return self.num_chars

    def flush(self) -> str:
        return self._advance_to(self._decode_all())

    def _may_add_text(self, token_id: int) -> bool:
        if self._skip_special_tokens and token_id in self._tokenizer.special_token_ids:
            return False
        return self._tokenizer.token_bytes(token_id) != b""

    def _context(self, prompt_token_ids: Sequence[int]) -> tuple[list[int], int]:
        """Returns the last of the prompt's tokens that is text by itself, and the length of its text. The bytes of an
        incomplete character are none: they stay the prompt's, and what completes them is U+FFFD, as it is alone. Where
        all that the prompt adds to the text is single bytes or the space that is dropped, any token that is text stands
        for it."""
        skip = self._skip_special_tokens
        last = prompt_token_ids[-_PROMPT_TOKENS:]
        texts = (token_id for token_id in reversed(last) if self._tokenizer.is_text(token_id, skip_special_tokens=skip))
        context = next(texts, None)
        if context is None and any(map(self._may_add_text, last)):
            context = self._tokenizer.text_token
        if context is None:
            return [], 0
        return [context], len(self._tokenizer.decode([context], skip_special_tokens=skip))

    def _ends_within_character(self) -> bool:
        """Tells whether the tokens since the last text are characters, of which the last one is not complete."""
        data = b"".join(map(self._tokenizer.token_bytes, self._token_ids[-self._num_without_text :]))
        try:
            return codecs.utf_8_decode(data, "strict", False)[1] < len(data)
        except UnicodeDecodeError:
            return False

    def _broken_context(self) -> list[int]:
        """Returns what stands for bytes that form no character. The last of them do not: they may form some alone."""
        token_id = self._tokenizer.backend.token_to_id(_NO_CHARACTER)
        return self._token_ids[-_RESUME_TOKENS:] if token_id is None else [token_id]

    def _resume(self, context: list[int], whole: str) -> str:
        """Continues after `whole`, of which the new stream gets `context`. Only byte-fallback tokens that form no
        character lead here."""
        self._stream = DecodeStream(ids=context, skip_special_tokens=self._skip_special_tokens)
        self._num_without_text = 0
        self._has_resumed = True
        return self._advance_to(whole)

    def _settle(self) -> str:
        """Forgets all tokens but the last one, whose text depends on no other: they would all be decoded again and
        again if byte-fallback tokens that form no character came between others. Returns what was not returned of their
        text."""
        whole = self._decode_all()
        text = self._advance_to(whole)
        self._num_settled_chars += len(whole)
        del self._token_ids[:-1]
        context = self._tokenizer.decode(self._token_ids, skip_special_tokens=self._skip_special_tokens)
        self._num_context_chars = len(context)
        return text

    def _decode_all(self) -> str:
        text = self._tokenizer.decode(self._token_ids, skip_special_tokens=self._skip_special_tokens)
        return text[self._num_context_chars :]

    def _advance_to(self, whole: str) -> str:
        text = whole[self.num_chars - self._num_settled_chars :]
        self.num_chars += len(text)
        return text
