"""Incremental decoding of one output sequence, with characters that are split over tokens, and with stop strings.

Invariant: all returned pieces together are the decoding of all tokens, as it goes on from the prompt, cut at the stop
string that is complete first (the longest one, if several end at the same character). Text that may become part of a
stop string is held back.
"""

from collections.abc import Sequence

import tokenizers
from tokenizers.decoders import DecodeStream

# Tokens of context for a new decoding stream: some decoders treat the first token differently.
_RESUME_TOKENS = 8
# Among as many last tokens of a prompt, one that is text by itself is looked for.
_PROMPT_TOKENS = 32


class Detokenizer:
    """The decoder of one sequence: `push` takes each token in order, then `flush` is called once. After a stop string
    has matched (`stopped_by`), neither may be called. The prompt's tokens are context, and no part of the text."""

    __slots__ = ("_held", "_include_stop", "_stop", "_text", "stopped_by")

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        prompt_token_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._text = TextStream(tokenizer, prompt_token_ids, skip_special_tokens=skip_special_tokens)
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._held = ""
        self.stopped_by: str | None = None

    @property
    def num_decoded_chars(self) -> int:
        """The number of characters decoded so far, including those held back: where the next token's text begins."""
        return self._text.num_chars

    def push(self, token_id: int, *, check_stop: bool = True) -> str:
        """Returns the text that is now certain. Without `check_stop`, the token's text is not part of any stop
        string."""
        text = self._text.push(token_id)
        if not self._stop:
            return text
        return self._filter(text) if check_stop else self._release() + text

    def flush(self) -> str:
        """Returns the rest of the text when the sequence has ended. An incomplete character becomes U+FFFD."""
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
    """Incremental decoding without stop strings: all pieces together are what the tokens add to the text of the prompt.
    That is `tokenizer.decode` of them, with the space in front that some decoders drop at the beginning of a text."""

    __slots__ = ("_num_context_chars", "_skip_special_tokens", "_stream", "_token_ids", "_tokenizer", "num_chars")

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._token_ids, self._num_context_chars = self._context(prompt_token_ids)
        self._stream = DecodeStream(ids=self._token_ids, skip_special_tokens=skip_special_tokens)
        self.num_chars = 0

    def push(self, token_id: int) -> str:
        self._token_ids.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception:  # when later bytes change how earlier ones decode, the library raises no narrower class
            return self._resume()
        if text is None:
            return ""
        self.num_chars += len(text)
        return text

    def flush(self) -> str:
        return self._advance_to(self._decode_all())

    def _context(self, prompt_token_ids: Sequence[int]) -> tuple[list[int], int]:
        """Returns the last of the prompt's tokens that is text by itself, and the length of its text. The bytes of an
        incomplete character are none: they stay the prompt's, and what completes them is U+FFFD, as it is alone."""
        for token_id in reversed(prompt_token_ids[-_PROMPT_TOKENS:]):
            text = self._tokenizer.decode([token_id], skip_special_tokens=self._skip_special_tokens)
            if text and "\ufffd" not in text:
                return [token_id], len(text)
        return [], 0

    def _resume(self) -> str:
        """Continues from the decoding of all tokens. Only byte-fallback tokens that form no character lead here."""
        self._stream = DecodeStream(
            ids=self._token_ids[-_RESUME_TOKENS:], skip_special_tokens=self._skip_special_tokens
        )
        return self._advance_to(self._decode_all().rstrip("\ufffd"))

    def _decode_all(self) -> str:
        text = self._tokenizer.decode(self._token_ids, skip_special_tokens=self._skip_special_tokens)
        return text[self._num_context_chars :]

    def _advance_to(self, whole: str) -> str:
        text = whole[self.num_chars :]
        self.num_chars += len(text)
        return text


def _first_beginning(stop: str, text: str) -> int:
    """Returns where the longest end of `text` that is a beginning of `stop` starts; the length of `text` if there is
    none."""
    start = text.find(stop[0], max(0, len(text) - len(stop)))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return start if start >= 0 else len(text)
