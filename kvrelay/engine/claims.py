"""The places and blocks that running and receiving sequences claim before queued ones may have any.

They are counted once for all sequences that are admitted in turn: counting anew for each would take a time quadratic in
their number, in which everything else waits.
"""

from collections.abc import Iterable

from kvrelay.core.kv.layout import num_blocks_for
from kvrelay.engine.request import KVRole
from kvrelay.engine.sequence import Sequence

_NUM_BLOCKS_AHEAD = 2


class Claims:
    """What sequences that compute, or whose KV arrives, claim. Whoever admits another one adds it.

    `num_places` is how many of `max_num_seqs` sequences are here, with the siblings that they will fork off."""

    __slots__ = ("_num_blocks", "_sequences", "num_places")

    def __init__(self, sequences: Iterable[Sequence]) -> None:
        self._sequences = list(sequences)
        self._num_blocks: int | None = None  # counted when it is asked for: where places lack, nobody does
        self.num_places = sum(sequence.width for sequence in self._sequences)

    def add(self, sequence: Sequence) -> None:
        """Counts one that now holds its first blocks."""
        self.num_places += sequence.width
        if self._num_blocks is None:
            self._sequences.append(sequence)
        else:
            self._num_blocks += _num_claimed(sequence)

    @property
    def num_blocks(self) -> int:
        """Counts the free blocks that these will need: for the later chunks of prompts, and for the next
        `_NUM_BLOCKS_AHEAD` of each output. If others took them, one of these would soon be preempted, and all that it
        had computed would be computed again."""
        if self._num_blocks is None:
            self._num_blocks = sum(map(_num_claimed, self._sequences))
        return self._num_blocks


def num_blocks_ahead(sequence: Sequence) -> int:
    """Returns how many of the claimed blocks are those of a sequence's outputs after its known tokens."""
    return _num_blocks(sequence)[1]


def _num_claimed(sequence: Sequence) -> int:
    num_known, num_ahead = _num_blocks(sequence)
    return max(0, num_known - len(sequence.block_table)) + num_ahead


def _num_blocks(sequence: Sequence) -> tuple[int, int]:
    """Returns how many blocks a sequence needs for its known tokens, and how many it claims after these."""
    num_known = min(num_blocks_for(sequence.num_expected_tokens, sequence.block_size), sequence.max_num_blocks)
    if sequence.request.role is KVRole.PRODUCE:
        return num_known, 0
    return num_known, sequence.width * min(_NUM_BLOCKS_AHEAD, sequence.max_num_blocks - num_known)
