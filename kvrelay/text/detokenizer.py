"""Incremental decoding of one output sequence, with characters that are split over tokens, and with stop strings.

Invariant: all returned pieces together are the decoding of all tokens, as it goes on from the prompt, cut at the stop
string that is complete first (the longest one, if several end at the same character). Text that may become part of a
stop string is held back.
"""

from collections.abc import Sequence

from kvrelay.text.text_stream import text_stream
from kvrelay.text.tokenizer import Tokenizer


class Detokenizer:
    """The decoder of one sequence: `push` takes each token in order, then `flush` is called once. After a stop string
    has matched (`stopped_by`), neither may be called. The prompt's tokens are context, and no part of the text."""

    __slots__ = ("_beginnings", "_first_chars", "_held", "_include_stop", "_stop", "_text", "stopped_by")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_token_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._text = text_stream(tokenizer, prompt_token_ids, skip_special_tokens=skip_special_tokens)
        self._stop = tuple(stop)
        self._first_chars = frozenset(string[0] for string in self._stop)
        self._include_stop = include_stop
        self._held = ""
        # Where in `_held` each stop string may begin, at the earliest. Only this is looked at again when more text
        # comes: otherwise a client could choose stop strings that cost milliseconds with every token.
        self._beginnings = [0] * len(self._stop)
        self.stopped_by: str | None = None

    def start_of(self, token_id: int) -> int:
        """Returns where the text of the next token begins, behind all decoded so far, including what is held back."""
        return self._text.start_of(token_id)

    def push(self, token_id: int, *, check_stop: bool = True) -> str:
        """Returns the text that is now certain. Without `check_stop`, which only the first tokens may be, no stop
        string ends with this token's text, but one may begin in it."""
        text = self._text.push(token_id)
        return self._filter(text, may_end=check_stop) if self._stop else text

    def flush(self) -> str:
        """Returns the rest of the text when the sequence has ended. An incomplete character becomes U+FFFD."""
        text = self._text.flush()
        if not self._stop:
            return text
        return self._filter(text, may_end=True) + self._held

    def _filter(self, text: str, *, may_end: bool) -> str:
        if not self._held and self._first_chars.isdisjoint(text):
            return text
        known = self._held + text
        ends: list[tuple[int, int, str]] = []
        for number, stop in enumerate(self._stop):
            start = known.find(stop, self._beginnings[number]) if may_end else -1
            if start >= 0:
                ends.append((start + len(stop), -len(stop), stop))
            else:
                self._beginnings[number] = _first_beginning(stop, known, self._beginnings[number])
        if ends:
            end, _, self.stopped_by = min(ends)
            self._held = ""
            return known[: end if self._include_stop else end - len(self.stopped_by)]
        split = min(self._beginnings)
        self._held = known[split:]
        self._beginnings = [beginning - split for beginning in self._beginnings]
        return known[:split]


def _first_beginning(stop: str, text: str, earliest: int) -> int:
    """Returns where, from `earliest` on, the longest end of `text` that is a beginning of `stop`, and not all of it,
    starts; the length of `text` if there is none."""
    start = text.find(stop[0], max(earliest, len(text) - len(stop) + 1))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return start if start >= 0 else len(text)
