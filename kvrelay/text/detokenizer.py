"""Tokens of one output sequence to text as they come: characters split over tokens, and stop strings.

Invariant: all returned pieces together are the decoding of all tokens, cut at the stop string that is complete first
(the longest one, if several end at the same character). What may still become part of a stop string is held back.
"""

from collections.abc import Sequence

import tokenizers
from tokenizers.decoders import DecodeStream

# Enough context for a decoder that treats the first token differently to be past that.
_RESUME_TOKENS = 8


class Detokenizer:
    """`push` each token in order, then `flush` once; neither after a stop string matched (`stopped_by`)."""

    __slots__ = ("_held", "_include_stop", "_matchers", "_text", "stopped_by")

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._text = TextStream(tokenizer, skip_special_tokens=skip_special_tokens)
        self._matchers = [_StopMatcher(text) for text in stop]
        self._include_stop = include_stop
        self._held = ""
        self.stopped_by: str | None = None

    @property
    def num_decoded_chars(self) -> int:
        """Characters decoded so far, held-back ones included: where the next token's text begins."""
        return self._text.num_chars

    def push(self, token_id: int, *, check_stop: bool = True) -> str:
        """The text that is now certain. Without `check_stop` the token's text cannot be part of a stop string."""
        text = self._text.push(token_id)
        if not self._matchers:
            return text
        return self._filter(text) if check_stop else self._release() + text

    def flush(self) -> str:
        """What is left when the sequence has ended; an incomplete character shows as U+FFFD."""
        text = self._text.flush()
        if not self._matchers:
            return text
        released = self._filter(text)
        return released if self.stopped_by is not None else released + self._release()

    def _release(self) -> str:
        held, self._held = self._held, ""
        for matcher in self._matchers:
            matcher.matched = 0
        return held

    def _filter(self, text: str) -> str:
        for i, char in enumerate(text):
            completed: str | None = None
            for matcher in self._matchers:
                if matcher.advance(char) and (completed is None or len(matcher.stop) > len(completed)):
                    completed = matcher.stop
            if completed is not None:
                self.stopped_by = completed
                known = self._held + text[: i + 1]
                self._held = ""
                return known if self._include_stop else known[: len(known) - len(completed)]
        known = self._held + text
        keep = max(matcher.matched for matcher in self._matchers)
        split = len(known) - keep
        self._held = known[split:]
        return known[:split]


class TextStream:
    """Incremental decoding: all pieces together equal `tokenizer.decode` of all tokens."""

    __slots__ = ("_skip_special_tokens", "_stream", "_token_ids", "_tokenizer", "num_chars")

    def __init__(self, tokenizer: tokenizers.Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._token_ids: list[int] = []
        self.num_chars = 0

    def push(self, token_id: int) -> str:
        self._token_ids.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception:  # the library raises no narrower class when later bytes change how earlier ones decode
            return self._resume()
        if text is None:
            return ""
        self.num_chars += len(text)
        return text

    def flush(self) -> str:
        return self._advance_to(self._decode_all())

    def _resume(self) -> str:
        """Carry on from the whole text; only byte-fallback tokens that form no character come here."""
        self._stream = DecodeStream(
            ids=self._token_ids[-_RESUME_TOKENS:], skip_special_tokens=self._skip_special_tokens
        )
        return self._advance_to(self._decode_all().rstrip("\ufffd"))

    def _decode_all(self) -> str:
        return self._tokenizer.decode(self._token_ids, skip_special_tokens=self._skip_special_tokens)

    def _advance_to(self, whole: str) -> str:
        text = whole[self.num_chars :]
        self.num_chars += len(text)
        return text


class _StopMatcher:
    """Knuth, Morris and Pratt (1977): how much of `stop` the text ends with, in constant time per character."""

    __slots__ = ("_borders", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0  # the text so far ends with stop[:matched], and with no longer beginning of it
        self._borders = _borders(stop)

    def advance(self, char: str) -> bool:
        """True when `stop` is complete with this character."""
        stop, matched = self.stop, self.matched
        while matched and stop[matched] != char:
            matched = self._borders[matched - 1]
        if stop[matched] == char:
            matched += 1
        self.matched = matched
        return matched == len(stop)


def _borders(text: str) -> list[int]:
    """For each end, the length of the longest proper beginning of `text` that is also an end of text[:end + 1]."""
    borders = [0] * len(text)
    matched = 0
    for i in range(1, len(text)):
        while matched and text[matched] != text[i]:
            matched = borders[matched - 1]
        if text[matched] == text[i]:
            matched += 1
        borders[i] = matched
    return borders
