"""The places and blocks that running and receiving sequences claim before queued ones may have any.

They are counted once for all sequences that are admitted in turn: counting anew for each would take a time quadratic in
their number, in which everything else waits.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kvrelay.core.kv.layout import num_blocks_for
from kvrelay.engine.request import KVRole
from kvrelay.engine.sequence import Sequence

_NUM_BLOCKS_AHEAD = 2


@dataclass(slots=True)
class Claims:
    """`num_places` is how many of `max_num_seqs` sequences are here, with the siblings that they will fork off.
    `num_blocks` is how many free blocks they will need: for the later chunks of prompts, and for the next
    `_NUM_BLOCKS_AHEAD` of each output. If others took them, one of these would soon be preempted, and all that it had
    computed would be computed again. Whoever admits a sequence adds it."""

    num_places: int = 0
    num_blocks: int = 0

    def add(self, sequence: Sequence) -> None:
        """Counts a sequence that computes or whose KV arrives."""
        self.num_places += sequence.width
        num_tokens = min(sequence.num_expected_tokens, sequence.max_num_tokens - 1)
        num_lacking = num_blocks_for(num_tokens, sequence.block_size) - len(sequence.block_table)
        self.num_blocks += max(0, num_lacking) + num_blocks_ahead(sequence)


def num_blocks_ahead(sequence: Sequence) -> int:
    """Returns how many of the claimed blocks are those of a sequence's outputs after its known tokens."""
    if sequence.request.role is KVRole.PRODUCE:
        return 0
    size, most = sequence.block_size, sequence.max_num_tokens - 1  # the KV of the last token is never needed
    num_later = num_blocks_for(most, size) - num_blocks_for(min(sequence.num_expected_tokens, most), size)
    return sequence.width * min(_NUM_BLOCKS_AHEAD, num_later)


def count_claims(admitted: Iterable[Sequence]) -> Claims:
    """Counts what all these claim."""
    claims = Claims()
    for sequence in admitted:
        claims.add(sequence)
    return claims
