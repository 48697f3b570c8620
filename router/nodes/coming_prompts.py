"""The prompts that a node is to compute, as far as this router knows: a later prompt with the same beginning will find
the blocks of that there, which the index of blocks knows nothing of yet.

Prompts are compared by digests over their first 256, 512, 768 ... tokens, which take a tenth of the time that naming
all blocks takes: only those are named that some node holds, and one more.
"""

import hashlib
from array import array
from collections import Counter
from collections.abc import Sequence

from kvrelay.core.kv.block_hash import BlockHash

STRIDE = 256  # tokens from one digest to the next

Beginnings = tuple[bytes, ...]
"""Digests of a prompt's beginnings, the shortest first."""


def beginnings(root: BlockHash, token_ids: Sequence[int]) -> Beginnings:
    """Returns the digests of a prompt whose first block has the parent `root`."""
    digest = hashlib.sha256(root)
    packed = memoryview(array("I", token_ids)).cast("B")
    size = STRIDE * 4
    found: list[bytes] = []
    for end in range(size, len(packed) + 1, size):
        digest.update(packed[end - size : end])
        found.append(digest.digest())
    return tuple(found)


class ComingPrompts:
    """The prompts that one node is to compute. Invariant: it is empty once each `begin` has had its `end`."""

    def __init__(self) -> None:
        self._counts: Counter[bytes] = Counter()

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
