"""The places and blocks that running and receiving sequences claim before queued ones may have any.

They are counted once for all sequences that are admitted in turn: counting anew for each would take a time quadratic in
their number, in which everything else waits.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kvrelay.core.kv.layout import num_blocks_for
from kvrelay.engine.sequence import Sequence


@dataclass(slots=True)
class Claims:
    """`num_places` is how many of `max_num_seqs` sequences are here, with the siblings that they will fork off.
    `num_blocks` is how many free blocks the later chunks of running prompts need: if others took them, one of these
    would be preempted. Whoever admits a sequence adds it."""

    num_places: int = 0
    num_blocks: int = 0

    def add_receiving(self, sequence: Sequence) -> None:
        """Counts a sequence that holds blocks for all its given tokens."""
        self.num_places += sequence.width

    def add_running(self, sequence: Sequence) -> None:
        """Counts a sequence that computes. A decode claims no block: it takes its next one when it needs it."""
        self.num_places += sequence.width
        if sequence.num_missing_tokens > 1:
            num_needed = num_blocks_for(sequence.num_expected_tokens, sequence.block_size)
            self.num_blocks += num_needed - len(sequence.block_table)


def count_claims(running: Iterable[Sequence], receiving: Iterable[Sequence]) -> Claims:
    """Counts what all these claim."""
    claims = Claims()
    for sequence in running:
        claims.add_running(sequence)
    for sequence in receiving:
        claims.add_receiving(sequence)
    return claims
