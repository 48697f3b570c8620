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

    __slots__ = ("_held", "_include_stop", "_stop", "_text", "stopped_by")

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._text = TextStream(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stop = tuple(stop)
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
        if not self._stop:
            return text
        return self._filter(text) if check_stop else self._release() + text

    def flush(self) -> str:
        """What is left when the sequence has ended; an incomplete character shows as U+FFFD."""
        text = self._text.flush()
        if not self._stop:
            return text
        return self._filter(text) + self._release()

    def _release(self) -> str:
        held, self._held = self._held, ""
        return held

    def _filter(self, text: str) -> str:
        known = self._held + text
        ends: list[tuple[int, int, str]] = []
        split = len(known)
        for stop in self._stop:
            if stop in known:
                ends.append((known.index(stop) + len(stop), -len(stop), stop))
            elif stop[0] in known:
                split = min(split, _first_beginning(stop, known))
        if ends:
            end, _, self.stopped_by = min(ends)
            self._held = ""
            return known[: end if self._include_stop else end - len(self.stopped_by)]
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


def _first_beginning(stop: str, text: str) -> int:
    """Where the longest end of `text` starts that is a beginning of `stop`; at the end of `text` when there is none."""
    start = text.find(stop[0], max(0, len(text) - len(stop)))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return start if start >= 0 else len(text)
