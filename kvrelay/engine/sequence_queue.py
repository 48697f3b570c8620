"""A queue of sequences in the order in which the scheduler takes them, and how many tokens they have together.

Invariant: it is sorted by `Sequence.order`. What changes of a sequence meanwhile does not change its place.
"""

import bisect
from collections.abc import Iterator

from kvrelay.engine.sequence import Sequence


class SequenceQueue:
    """The sequences. `num_tokens` is how many tokens they had together when they came in."""

    def __init__(self) -> None:
        self._items: list[Sequence] = []
        self._num_tokens: dict[Sequence, int] = {}
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)

    def push(self, sequence: Sequence) -> None:
        bisect.insort(self._items, sequence, key=lambda item: item.order)
        self._num_tokens[sequence] = sequence.num_tokens
        self.num_tokens += sequence.num_tokens

    def peek(self) -> Sequence:
        return self._items[0]

    def last(self) -> Sequence:
        return self._items[-1]

    def pop(self) -> Sequence:
        sequence = self._items.pop(0)
        self.num_tokens -= self._num_tokens.pop(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        self._items.remove(sequence)
        self.num_tokens -= self._num_tokens.pop(sequence)
