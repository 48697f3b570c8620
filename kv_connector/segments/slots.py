"""The slots of a segment: one per block, with its header, written by the owner while others read.

    0       8     sequence counter (uint64)
    8       96    block header (header.py)
    104     24    zeros

A slot's counter is odd while its header changes, and has another value afterwards: a reader that sees the same even
value before and after its copy has a header that was valid throughout (Linux calls this a seqlock). The counter is the
cheap check; what makes a copy trustworthy, also on processors with a weak memory order, is the digest of the copied
bytes.

All blocks of a call go through a few array operations together, because a node's engine waits for the interpreter
meanwhile.
"""

import mmap
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kv_connector.base import FetchOutcome
from kv_connector.geometry import Geometry
from kv_connector.header import DIGEST_OFFSET, HASH_OFFSET, HEADER_BYTES, BlockHeader, Mismatch
from kv_connector.verdict import Verdict
from kvrelay.core.kv.block_hash import HASH_BYTES, BlockHash
from kvrelay.core.kv.named_block import NamedBlock

SLOT_BYTES = 128
NO_SLOT = -1
_MOST_SLOTS = 8  # that are found of one name
_LOW_BITS = 0xFFFF

_SLOT = np.dtype(
    {
        "names": ["sequence", "header", "name", "name_prefix"],
        "formats": ["<u8", (np.uint8, HEADER_BYTES), (np.uint8, HASH_BYTES), "<u8"],
        "offsets": [0, 8, 8 + HASH_OFFSET, 8 + HASH_OFFSET],
        "itemsize": SLOT_BYTES,
    }
)


class OwnedSlots:
    """The slots as their owner has them. `absent` and `fill` may be called from another thread than `clear`."""

    def __init__(self, mapping: mmap.mmap, num_blocks: int, *, offset: int) -> None:
        self._slots = np.frombuffer(mapping, _SLOT, num_blocks, offset)
        self._lock = threading.Lock()  # held for a few stores, never for a copy or a digest

    def absent(self, blocks: Sequence[NamedBlock]) -> list[tuple[NamedBlock, int]]:
        """Returns the blocks that their slots do not have yet, each with its slot's counter. Call this before the
        payloads are digested."""
        ids = _ids([block.block_id for block in blocks])
        # Without the lock, since the engine would wait for it while this thread waits for the interpreter. A slot that
        # changes meanwhile has another counter when `fill` compares it.
        counters = self._slots["sequence"][ids].tolist()
        headers = _headers(self._slots, ids)
        return [
            (block, counter)
            for block, counter, header in zip(blocks, counters, map(BlockHeader.decode, headers), strict=True)
            if (header.block_hash, header.num_tokens) != (block.block_hash, block.num_tokens)
        ]

    def fill(self, absent: Sequence[tuple[NamedBlock, int]], headers: Sequence[BlockHeader]) -> int:
        """Writes headers into slots; returns how many slots that were. Of two blocks for one slot the last one counts.
        A slot that was cleared since its counter was read stays empty, because the digested content is gone."""
        if not absent:
            return 0
        ids = _ids([block.block_id for block, _ in absent])
        expected = np.array([counter for _, counter in absent], np.uint64)
        encoded = np.frombuffer(b"".join(header.encode() for header in headers), np.uint8).reshape(-1, HEADER_BYTES)
        with self._lock:
            held = self._slots["sequence"][ids] == expected
            self._change(ids[held], encoded[held])
        return len(set(ids[held].tolist()))

    def clear(self, block_ids: Sequence[int]) -> None:
        """Empties slots. Takes microseconds."""
        with self._lock:
            if len(self._slots):
                self._change(_ids(block_ids), 0)

    def release(self) -> None:
        """Drops the view of the mapping, so that it can be closed. Waits for a `clear` under way; later ones have no
        effect."""
        with self._lock:
            self._slots = np.empty(0, _SLOT)

    def _change(self, ids: NDArray[np.intp], headers: NDArray[np.uint8] | int) -> None:
        self._slots["sequence"][ids] += 1
        self._slots["header"][ids] = headers
        self._slots["sequence"][ids] += 1


@dataclass(frozen=True, slots=True)
class SlotSnapshots:
    """Some slots before their blocks are copied. `refusals` has a verdict for each whose copy would be useless, by its
    place among them. The others are at `places`: their counters, and the digests that the copies must have."""

    refusals: dict[int, Verdict]
    places: list[int]
    slots: NDArray[np.intp]
    counters: NDArray[np.uint64]
    payload_digests: NDArray[np.uint8]  # [num_places, 16]


class PeerSlots:
    """The slots of another node. Used by one thread."""

    def __init__(self, mapping: mmap.mmap, geometry: Geometry, num_blocks: int, *, offset: int) -> None:
        self._slots = np.frombuffer(mapping, _SLOT, num_blocks, offset)
        self._geometry = geometry

    def find(self, names: Sequence[BlockHash]) -> list[NDArray[np.intp]]:
        """Returns the slots that may have these names now, in turns. A turn is `[num_names]`, with a slot for each name
        or `NO_SLOT`: first one slot of each name, then a second one of those that have more, and so on up to
        `_MOST_SLOTS`. Only the first 8 bytes of a name are compared."""
        prefixes = np.frombuffer(b"".join(names), "<u8")[:: HASH_BYTES // 8]
        wanted, place = np.unique(prefixes, return_inverse=True)
        held = np.ascontiguousarray(self._slots["name_prefix"])
        # There may be half a million slots. What rules out nearly all of them is a table of the low bits of the names.
        may_be_wanted = np.zeros(_LOW_BITS + 1, np.bool_)
        may_be_wanted[wanted & _LOW_BITS] = True
        left = np.flatnonzero(may_be_wanted[held & _LOW_BITS])
        nearest = np.minimum(np.searchsorted(wanted, held[left]), len(wanted) - 1)
        same = wanted[nearest] == held[left]
        left, nearest = left[same], nearest[same]
        turns: list[NDArray[np.intp]] = []
        while left.size and len(turns) < _MOST_SLOTS:
            turn = np.full(len(wanted), NO_SLOT, np.intp)
            turn[nearest[::-1]] = left[::-1]  # of several slots for one place the last one stays
            turns.append(turn[place])
            later = turn[nearest] != left
            left, nearest = left[later], nearest[later]
        return turns

    def take_snapshots(self, slots: NDArray[np.intp], blocks: Sequence[NamedBlock], *, epoch: int) -> SlotSnapshots:
        """Returns the state of slots that should have these blocks, published by the node of that epoch."""
        before = self._slots["sequence"][slots]
        headers = self._slots["header"][slots]
        steady = (self._slots["sequence"][slots] == before) & (before % 2 == 0)
        right = np.frombuffer(self._geometry.headers_before_digest(blocks, epoch), np.uint8)
        good = steady & (headers[:, :DIGEST_OFFSET] == right.reshape(-1, DIGEST_OFFSET)).all(axis=1)
        refusals = {
            place: self._refusal(headers[place], blocks[place], epoch) if steady[place] else FetchOutcome.MISSING
            for place in np.flatnonzero(~good).tolist()
        }
        places = np.flatnonzero(good)
        return SlotSnapshots(refusals, places.tolist(), slots[places], before[places], headers[places, DIGEST_OFFSET:])

    def judge(self, snapshots: SlotSnapshots, digests: Sequence[bytes]) -> list[Verdict]:
        """Returns the verdicts on copies that were made after `snapshots`, given the digests of what arrived."""
        held = self._slots["sequence"][snapshots.slots] == snapshots.counters
        arrived = np.frombuffer(b"".join(digests), np.uint8).reshape(snapshots.payload_digests.shape)
        whole = (arrived == snapshots.payload_digests).all(axis=1)
        if (held & whole).all():  # nearly always
            return [FetchOutcome.FETCHED] * len(held)
        return [_judged(*copied) for copied in zip(held.tolist(), whole.tolist(), strict=True)]

    def release(self) -> None:
        """Drops the view of the mapping."""
        self._slots = np.empty(0, _SLOT)

    def _refusal(self, header: NDArray[np.uint8], block: NamedBlock, epoch: int) -> Verdict:
        """Returns why a copy would be useless for a slot whose header is not that of the block."""
        decoded = BlockHeader.decode(header.tobytes())
        if decoded.block_hash != block.block_hash:
            return FetchOutcome.MISSING  # retracted or replaced since it was found
        return self._geometry.verify(decoded, block, epoch=epoch) or Mismatch.VERSION  # zeros that are none


def _judged(is_held: bool, is_whole: bool) -> Verdict:
    if not is_held:
        return FetchOutcome.MISSING  # retracted during the copy, which may be anything, without anybody's fault
    return FetchOutcome.FETCHED if is_whole else Mismatch.DIGEST


def _ids(values: Sequence[int]) -> NDArray[np.intp]:
    return np.asarray(values, np.intp)


def _headers(slots: NDArray[np.void], ids: NDArray[np.intp]) -> list[bytes]:
    """Returns the encoded headers."""
    data = slots["header"][ids].tobytes()
    return [data[start : start + HEADER_BYTES] for start in range(0, len(data), HEADER_BYTES)]
