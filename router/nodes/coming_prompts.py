"""The prompts that a node is to compute, as far as this router knows: a later prompt with the same beginning will find
the blocks of that there, which the index of blocks knows nothing of yet.

Prompts are compared by Python's hashes of their first 256, 512, 768 ... tokens. Names of all their blocks would take
much longer: only those are named that some node holds, and one more. Two beginnings with the same hash cost a worse
placement, nothing else.
"""

from collections import Counter
from collections.abc import Hashable
from typing import TypeAlias

from kvrelay.core.kv.block_hash import BlockHash

STRIDE = 256  # tokens from one hash to the next

Beginnings: TypeAlias = tuple[Hashable, ...]
"""Hashes of a prompt's beginnings, the shortest first."""


def beginnings(root: BlockHash, token_ids: tuple[int, ...]) -> Beginnings:
    """Returns the hashes of a prompt whose first block has the parent `root`."""
    found: list[int] = []
    last = hash(root)
    for end in range(STRIDE, len(token_ids) + 1, STRIDE):
        last = hash((last, token_ids[end - STRIDE : end]))
        found.append(last)
    return tuple(found)


class ComingPrompts:
    """The prompts that one node is to compute. Invariant: it is empty once each `begin` has had its `end`."""

    def __init__(self) -> None:
        self._counts: Counter[Hashable] = Counter()

    def __len__(self) -> int:
        """Returns how many different beginnings these prompts have."""
        return len(self._counts)

    def begin(self, prompt: Beginnings) -> None:
        self._counts.update(prompt)

    def end(self, prompt: Beginnings) -> None:
        for beginning in prompt:
            self._counts[beginning] -= 1
            if not self._counts[beginning]:
                del self._counts[beginning]

    def num_common_tokens(self, prompt: Beginnings) -> int:
        """Returns how many of the prompt's first tokens are also those of a prompt that is to be computed: a multiple
        of `STRIDE`."""
        count = 0
        while count < len(prompt) and prompt[count] in self._counts:
            count += 1
        return STRIDE * count
