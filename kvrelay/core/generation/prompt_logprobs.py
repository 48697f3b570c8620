"""Log-probabilities of a prompt's tokens, in columns.

A prompt may have 50,000 tokens, with 20 others for each. An object or a message for each would take 100 MB, and the one
loop of a node or router half a second.
"""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from kvrelay.core.generation.outputs import TokenLogprobs


def _integers(column: bytes = b"") -> "array[int]":
    return array("I", column)


def _floats(column: bytes = b"") -> "array[float]":
    return array("f", column)


@dataclass(slots=True)
class PromptLogprobs:
    """Log-probabilities of the prompt tokens from the second on, in order. Iterating over them makes their
    `TokenLogprobs`. All tokens have equally many most likely ones in `top_token_ids` and `top_logprobs`, one token
    after the other."""

    token_ids: "array[int]" = field(default_factory=_integers)
    logprobs: "array[float]" = field(default_factory=_floats)
    ranks: "array[int]" = field(default_factory=_integers)
    top_token_ids: "array[int]" = field(default_factory=_integers)
    top_logprobs: "array[float]" = field(default_factory=_floats)

    @classmethod
    def of(cls, entries: Iterable[TokenLogprobs]) -> "PromptLogprobs":
        found = cls()
        for entry in entries:
            found.token_ids.append(entry.token_id)
            found.logprobs.append(entry.logprob)
            found.ranks.append(entry.rank)
            found.top_token_ids.extend(token_id for token_id, _ in entry.top)
            found.top_logprobs.extend(logprob for _, logprob in entry.top)
        return found

    @classmethod
    def of_bytes(
        cls, token_ids: bytes, logprobs: bytes, ranks: bytes, top_token_ids: bytes, top_logprobs: bytes
    ) -> "PromptLogprobs":
        """Returns those in these columns of uint32 and float32. Raises ValueError if they do not belong together."""
        found = cls(
            _integers(token_ids), _floats(logprobs), _integers(ranks), _integers(top_token_ids), _floats(top_logprobs)
        )
        num_top = len(found.top_token_ids)
        if not (len(found) == len(found.logprobs) == len(found.ranks) and num_top == len(found.top_logprobs)):
            raise ValueError("columns of different lengths")
        if num_top % max(1, len(found)):
            raise ValueError("not all tokens have equally many most likely ones")
        return found

    def extend(self, others: "PromptLogprobs") -> None:
        """Adds those of the tokens that follow."""
        self.token_ids += others.token_ids
        self.logprobs += others.logprobs
        self.ranks += others.ranks
        self.top_token_ids += others.top_token_ids
        self.top_logprobs += others.top_logprobs

    def __len__(self) -> int:
        return len(self.token_ids)

    def __iter__(self) -> Iterator[TokenLogprobs]:
        num_top = len(self.top_token_ids) // max(1, len(self))
        tops = zip(self.top_token_ids, self.top_logprobs, strict=True)
        for token_id, logprob, rank in zip(self.token_ids, self.logprobs, self.ranks, strict=True):
            yield TokenLogprobs(token_id, logprob, rank, tuple(islice(tops, num_top)))
